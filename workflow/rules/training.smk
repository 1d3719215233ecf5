# Imitation, then reinforcement, which resumes after a kill, hence the retries. A scheduler's job
# leaves them to the engine that has submitted it: its own time may be over.
RETRIES = 0 if workflow.remote_exec else 3
ASKED = "; threads {threads}, MB {resources.mem_mb}, minutes {resources.runtime}, GPUs {resources.gpu}"


rule pretrain:
    input:
        lambda wildcards: (
            f"data/demos/{run_of('pretrain', 'demonstrations')(wildcards)}.demo"
        ),
        SOURCES["pretrain"],
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
    priority: 1
    retries: RETRIES
    conda:
        "../envs/pipeline.yaml"
    threads: threads_of("pretrain")
    resources:
        mem_mb=asked("memory_mb"),
        runtime=60,
        gpu=asked("gpus"),
    params:
        watched=watched(
            "experiments.{base}.pretrain",
            "runtime",
            "runs.pretrain.{key}",
            of="pretrain",
        ),
    message:
        f"Imitate the demonstrations: {{wildcards.experiment}}, seed {{wildcards.seed}}{ASKED}"
    shell:
        "python workflow/scripts/pretrain.py {wildcards.experiment} --seed {wildcards.seed}"
        " > {log} 2>&1"


rule train:
    input:
        run_of("train_from_scratch", "trainer"),
        lambda wildcards: (
            f"build/env/{run_of('train_from_scratch', 'environment')(wildcards)}"
        ),
        SOURCES["train"],
    output:
        "results/train/{experiment}/seed{seed}/policy.pt",
        "results/train/{experiment}/seed{seed}/metrics.json",
        report(
            "results/train/{experiment}/seed{seed}/progress.csv",
            caption="../report/train.rst",
            category="Learning curves",
            subcategory="{experiment}",
            labels={"seed": "{seed}", "shows": "summaries by environment steps"},
        ),
    log:
        "logs/train/{experiment}/seed{seed}.log",
    benchmark:
        "logs/train/{experiment}/seed{seed}.tsv"
    wildcard_constraints:
        experiment=one_of(experiments("train_from_scratch")),
        seed=r"\d+",
    priority: 2
    retries: RETRIES
    conda:
        "../envs/pipeline.yaml"
    threads: threads_of("train_from_scratch")
    resources:
        mem_mb=asked("memory_mb", of="train_from_scratch"),
        runtime=asked("minutes"),
        gpu=asked("gpus", of="train_from_scratch"),
    params:
        watched=watched(
            "experiments.{base}.overrides",
            "runtime",
            "runs.train_from_scratch.{key}",
            of="train_from_scratch",
        ),
    message:
        f"Train {{wildcards.experiment}}, seed {{wildcards.seed}}{ASKED}"
    shell:
        "python workflow/scripts/train.py {wildcards.experiment} --seed {wildcards.seed}"
        " > {log} 2>&1"


use rule train as train_pretrained with:
    input:
        run_of("train_pretrained", "trainer"),
        lambda wildcards: (
            f"build/env/{run_of('train_pretrained', 'environment')(wildcards)}"
        ),
        lambda wildcards: (
            f"data/demos/{run_of('train_pretrained', 'demonstrations')(wildcards)}.demo"
        ),
        "results/pretrain/{experiment}/seed{seed}/policy.pt",
        SOURCES["train"],
    wildcard_constraints:
        experiment=one_of(experiments("train_pretrained")),
        seed=r"\d+",
    threads: threads_of("train_pretrained")
    resources:
        mem_mb=asked("memory_mb", of="train_pretrained"),
        runtime=asked("minutes"),
        gpu=asked("gpus", of="train_pretrained"),
    params:
        watched=watched(
            "experiments.{base}.overrides",
            "runtime",
            "runs.train_pretrained.{key}",
            of="train_pretrained",
        ),
    message:
        f"Train {{wildcards.experiment}}, seed {{wildcards.seed}}, from the pretrained policy{ASKED}"


rule propose:
    input:
        lambda wildcards: RUNS["proposals"][f"{wildcards.name}-{wildcards.number}"][
            "before"
        ],
        told_of(
            "results/evaluate/{told}/seed{seed}/returns.png",
            "results/evaluate/{told}/seed{seed}/episodes.csv",
            "results/evaluate/{told}/seed{seed}/metrics.json",
            "results/train/{told}/seed{seed}/policy.pt",
            "results/train/{told}/seed{seed}/metrics.json",
            "results/train/{told}/seed{seed}/progress.csv",
        ),
        SOURCES["propose"],
    output:
        "results/propose/{name}/{number}.json",
    log:
        "logs/propose/{name}/{number}.log",
    benchmark:
        "logs/propose/{name}/{number}.tsv"
    wildcard_constraints:
        name=one_of(RUNS["sweeps"]),
        number=r"\d+",
    priority: 5
    conda:
        "../envs/pipeline.yaml"
    threads: 1
    params:
        watched=watched("runs.proposals.{name}-{number}"),
    message:
        "Propose the trial {wildcards.number} of {wildcards.name}"
    shell:
        "python workflow/scripts/propose.py {wildcards.name}/{wildcards.number}"
        " > {log} 2>&1"


rule sweep:
    input:
        trials_of(
            "results/train/{experiment}/seed{seed}/policy.pt",
            "results/train/{experiment}/seed{seed}/metrics.json",
            "results/train/{experiment}/seed{seed}/progress.csv",
            "results/evaluate/{experiment}/seed{seed}/returns.png",
            "results/evaluate/{experiment}/seed{seed}/episodes.csv",
            "results/evaluate/{experiment}/seed{seed}/metrics.json",
        ),
        SOURCES["sweep"],
    output:
        "results/sweep/{name}/best.json",
        "results/sweep/{name}/metrics.json",
        report(
            "results/sweep/{name}/trials.csv",
            caption="../report/sweep.rst",
            category="Sweeps",
            labels={"sweep": "{name}", "shows": "trials, best first"},
        ),
    log:
        "logs/sweep/{name}.log",
    benchmark:
        "logs/sweep/{name}.tsv"
    wildcard_constraints:
        name=one_of(RUNS["sweeps"]),
    priority: 5
    conda:
        "../envs/pipeline.yaml"
    threads: 1
    params:
        watched=watched("runs.sweeps.{name}"),
    message:
        "Rank the trials of {wildcards.name}"
    shell:
        "python workflow/scripts/sweep.py {wildcards.name} > {log} 2>&1"


use rule train as train_chosen with:
    input:
        run_of("train_chosen", "trainer"),
        lambda wildcards: (
            f"build/env/{run_of('train_chosen', 'environment')(wildcards)}"
        ),
        run_of("train_chosen", "chosen"),
        SOURCES["train"],
    wildcard_constraints:
        experiment=one_of(experiments("train_chosen")),
        seed=r"\d+",
    threads: threads_of("train_chosen")
    resources:
        mem_mb=asked("memory_mb", of="train_chosen"),
        runtime=asked("minutes"),
        gpu=asked("gpus", of="train_chosen"),
    params:
        watched=watched(
            "experiments.{base}.overrides",
            "runtime",
            "runs.train_chosen.{key}",
            of="train_chosen",
        ),
    message:
        f"Train with what a sweep has chosen, {{wildcards.experiment}}, seed {{wildcards.seed}}{ASKED}"


for TABLE in TRAINING:
    DELIVERABLES += each(TABLE, "results/train/{experiment}/seed{seed}/policy.pt")
DELIVERABLES += [f"results/sweep/{name}/metrics.json" for name in RUNS["sweeps"]]
