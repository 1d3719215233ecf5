# One target for each subset, experiment and sweep, and for each of their stages:
# `snakemake results/smoke`, `snakemake results/collector_ppo/train`.
for NAME in [*PARAMS.subsets, *PARAMS.experiments, *PARAMS.sweeps]:

    rule:
        name:
            f"results/{NAME}"
        input:
            lambda wildcards, name=NAME: known(
                [target.file for target in targets(PARAMS, [name])]
            ),
        localrule: True

    for STAGE in stages_of_all(NAME):

        rule:
            name:
                f"results/{NAME}/{STAGE}"
            input:
                lambda wildcards, name=NAME, stage=STAGE: known(
                    [target.file for target in targets(PARAMS, [name], stage=stage)]
                ),
            localrule: True
