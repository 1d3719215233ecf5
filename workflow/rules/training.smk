# Imitation, then reinforcement. Both resume by themselves after a kill, hence the retries.
LEARNING = (
    "algos",
    "data",
    "envs",
    "nets",
    "protocol",
    "settings",
    "stages/policies.py",
    "stages/provenance.py",
    "stages/tracked.py",
    "tracking",
    "trainer",
)


rule pretrain:
    input:
        lambda wildcards: (
            f"data/demos/{run_of('pretrain', 'demonstrations')(wildcards)}.demo"
        ),
        sources("pretrain", *LEARNING),
    output:
        "results/pretrain/{experiment}/seed{seed}/policy.pt",
        "results/pretrain/{experiment}/seed{seed}/metrics.json",
        "results/pretrain/{experiment}/seed{seed}/progress.csv",
    log:
        "logs/pretrain/{experiment}/seed{seed}.log",
    benchmark:
        "logs/pretrain/{experiment}/seed{seed}.tsv"
    wildcard_constraints:
        experiment=one_of(experiments("pretrain")),
        seed=r"\d+",
    retries: 1
    threads: PARAMS.runtime.torch_threads
    resources:
        mem_mb=2000,
        runtime=60,
    params:
        watched=watched(
            "experiments.{experiment}.pretrain",
            "runtime",
            "runs.pretrain.{experiment}-{seed}",
        ),
    message:
        "Imitate the demonstrations: {wildcards.experiment}, seed {wildcards.seed}"
    shell:
        "python workflow/scripts/pretrain.py {wildcards.experiment} --seed {wildcards.seed}"
        " > {log} 2>&1"


rule train:
    input:
        run_of("train_from_scratch", "trainer"),
        lambda wildcards: (
            f"build/env/{run_of('train_from_scratch', 'environment')(wildcards)}"
        ),
        sources("train", *LEARNING, "stages/executable.py"),
    output:
        "results/train/{experiment}/seed{seed}/policy.pt",
        "results/train/{experiment}/seed{seed}/metrics.json",
        report(
            "results/train/{experiment}/seed{seed}/progress.csv",
            category="Training",
            subcategory="{experiment}",
            labels={"seed": "{seed}"},
        ),
    log:
        "logs/train/{experiment}/seed{seed}.log",
    benchmark:
        "logs/train/{experiment}/seed{seed}.tsv"
    wildcard_constraints:
        experiment=one_of(experiments("train_from_scratch")),
        seed=r"\d+",
    retries: 1
    threads: PARAMS.runtime.torch_threads
    resources:
        mem_mb=2000,
        runtime=720,
    params:
        watched=watched("experiments.{experiment}.overrides", "runtime"),
    message:
        "Train {wildcards.experiment}, seed {wildcards.seed}"
    shell:
        "python workflow/scripts/train.py {wildcards.experiment} --seed {wildcards.seed}"
        " > {log} 2>&1"


rule train_pretrained:
    input:
        run_of("train_pretrained", "trainer"),
        lambda wildcards: (
            f"build/env/{run_of('train_pretrained', 'environment')(wildcards)}"
        ),
        lambda wildcards: (
            f"data/demos/{run_of('train_pretrained', 'demonstrations')(wildcards)}.demo"
        ),
        "results/pretrain/{experiment}/seed{seed}/policy.pt",
        sources("train", *LEARNING, "stages/executable.py"),
    output:
        "results/train/{experiment}/seed{seed}/policy.pt",
        "results/train/{experiment}/seed{seed}/metrics.json",
        report(
            "results/train/{experiment}/seed{seed}/progress.csv",
            category="Training",
            subcategory="{experiment}",
            labels={"seed": "{seed}"},
        ),
    log:
        "logs/train/{experiment}/seed{seed}.log",
    benchmark:
        "logs/train/{experiment}/seed{seed}.tsv"
    wildcard_constraints:
        experiment=one_of(experiments("train_pretrained")),
        seed=r"\d+",
    retries: 1
    threads: PARAMS.runtime.torch_threads
    resources:
        mem_mb=2000,
        runtime=720,
    params:
        watched=watched("experiments.{experiment}.overrides", "runtime"),
    message:
        "Train {wildcards.experiment}, seed {wildcards.seed}, from the pretrained policy"
    shell:
        "python workflow/scripts/train.py {wildcards.experiment} --seed {wildcards.seed}"
        " > {log} 2>&1"
