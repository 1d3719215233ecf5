# The DAG for Snakemake: `snakemake --cores 8`. dvc.yaml describes the same one; `make check`
# compares them. The rules lie in workflow/rules, the logic in src/pipeline/stages.
from snakemake.utils import min_version

min_version("9.10")


container: "rl-pipeline.sif"  # workflow/Dockerfile; used with --software-deployment-method apptainer


report: "workflow/report/workflow.rst"


include: "workflow/rules/common.smk"


localrules:
    all,


rule all:
    default_target: True
    input:
        deliverables(),


include: "workflow/rules/environments.smk"
include: "workflow/rules/training.smk"
include: "workflow/rules/results.smk"
include: "workflow/rules/subsets.smk"
