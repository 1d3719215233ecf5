# One target for each subset, experiment and sweep, and for each of their stages:
# `snakemake results/smoke`, `snakemake results/collector_ppo/train`.
for NAME in [*PARAMS.subsets, *PARAMS.experiments, *PARAMS.sweeps]:

    rule:
        name:
            f"results/{NAME}"
        input:
            lambda wildcards, name=NAME: known([*targets(PARAMS, [name]).values()]),
        localrule: True

    for STAGE in stages_of_all(NAME):

        rule:
            name:
                f"results/{NAME}/{STAGE}"
            input:
                lambda wildcards, name=NAME, stage=STAGE: known(
                    [*targets(PARAMS, [name], stage=stage).values()]
                ),
            localrule: True


# Snakemake copies its globals for each job, and has put there what each of these rules runs: nothing.
for NAME in [name for name in workflow.globals if name.startswith("__results/")]:
    del workflow.globals[NAME]
