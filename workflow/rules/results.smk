# From a trained policy to the comparison of all experiments.
rule export:
    input:
        "results/train/{experiment}/seed{seed}/policy.pt",
        SOURCES["export"],
    output:
        directory("results/export/{experiment}/seed{seed}"),
    log:
        "logs/export/{experiment}/seed{seed}.log",
    benchmark:
        "logs/export/{experiment}/seed{seed}.tsv"
    wildcard_constraints:
        experiment=one_of(experiments("export")),
        seed=r"\d+",
    priority: 3
    conda:
        "../envs/pipeline.yaml"
    threads: 1
    params:
        watched=watched("runtime"),
    message:
        "Export {wildcards.experiment}, seed {wildcards.seed}"
    shell:
        "python workflow/scripts/export.py {wildcards.experiment} --seed {wildcards.seed}"
        " > {log} 2>&1"


rule evaluate:
    input:
        lambda wildcards: f"build/env/{run_of('evaluate', 'environment')(wildcards)}",
        "results/export/{experiment}/seed{seed}",
        SOURCES["evaluate"],
    output:
        report(
            "results/evaluate/{experiment}/seed{seed}/returns.png",
            caption="../report/evaluate.rst",
            category="Evaluation",
            subcategory="{experiment}",
            labels={"seed": "{seed}", "shows": "distribution of returns"},
        ),
        "results/evaluate/{experiment}/seed{seed}/episodes.csv",
        "results/evaluate/{experiment}/seed{seed}/metrics.json",
    log:
        "logs/evaluate/{experiment}/seed{seed}.log",
    benchmark:
        "logs/evaluate/{experiment}/seed{seed}.tsv"
    wildcard_constraints:
        experiment=one_of(experiments("evaluate")),
        seed=r"\d+",
    priority: 4
    conda:
        "../envs/pipeline.yaml"
    threads: 1
    params:
        watched=watched("experiments.{base}.evaluation", of="evaluate"),
    message:
        "Evaluate {wildcards.experiment}, seed {wildcards.seed}"
    shell:
        "python workflow/scripts/evaluate.py {wildcards.experiment} --seed {wildcards.seed}"
        " > {log} 2>&1"


use rule evaluate as evaluate_video with:
    input:
        lambda wildcards: (
            f"build/env/{run_of('evaluate_video', 'environment')(wildcards)}"
        ),
        "results/export/{experiment}/seed{seed}",
        SOURCES["evaluate"],
    output:
        report(
            "results/evaluate/{experiment}/seed{seed}/returns.png",
            caption="../report/evaluate.rst",
            category="Evaluation",
            subcategory="{experiment}",
            labels={"seed": "{seed}", "shows": "distribution of returns"},
        ),
        report(
            "results/evaluate/{experiment}/seed{seed}/median.gif",
            caption="../report/video.rst",
            category="Evaluation",
            subcategory="{experiment}",
            labels={"seed": "{seed}", "shows": "median episode"},
        ),
        report(
            "results/evaluate/{experiment}/seed{seed}/best.gif",
            caption="../report/video.rst",
            category="Evaluation",
            subcategory="{experiment}",
            labels={"seed": "{seed}", "shows": "best episode"},
        ),
        "results/evaluate/{experiment}/seed{seed}/episodes.csv",
        "results/evaluate/{experiment}/seed{seed}/metrics.json",
    wildcard_constraints:
        experiment=one_of(experiments("evaluate_video")),
        seed=r"\d+",
    params:
        watched=watched("experiments.{base}.evaluation", of="evaluate_video"),


TRAINED = "results/train/{experiment}/seed{seed}"
EVALUATED = "results/evaluate/{experiment}/seed{seed}"


rule report:
    input:
        *[
            each(table, f"{EVALUATED}/{name}")
            for table in EVALUATION
            for name in ("returns.png", "episodes.csv", "metrics.json")
        ],
        *[
            each("evaluate_video", f"{EVALUATED}/{kind}.gif")
            for kind in ("median", "best")
        ],
        *[
            each(table, f"{TRAINED}/{name}")
            for table in TRAINING
            for name in ("policy.pt", "metrics.json", "progress.csv")
        ],
        SOURCES["report"],
    output:
        report(
            "results/report/report.html",
            caption="../report/report.rst",
            category="Comparison",
            labels={"shows": "everything on one page", "of": "all"},
        ),
        "results/report/report.md",
        report(
            directory("results/report/figures"),
            patterns=["{of}-{shows}.png"],
            caption="../report/figures.rst",
            category="Comparison",
            labels={"shows": "{shows}", "of": "{of}"},
        ),
        report(
            "results/report/comparison.csv",
            caption="../report/tables.rst",
            category="Comparison",
            labels={"shows": "scores", "of": "all"},
        ),
        report(
            "results/report/improvement.csv",
            caption="../report/tables.rst",
            category="Comparison",
            labels={"shows": "probabilities of improvement", "of": "all"},
        ),
        report(
            "results/report/learning.csv",
            caption="../report/tables.rst",
            category="Comparison",
            labels={"shows": "learning curves over seeds", "of": "all"},
        ),
        "results/report/summary.json",
    log:
        "logs/report.log",
    benchmark:
        "logs/report.tsv"
    conda:
        "../envs/pipeline.yaml"
    threads: 1
    params:
        watched=watched("experiments", "runs.sweeps", "runs.train_chosen"),
    message:
        "Compare the experiments"
    shell:
        "python workflow/scripts/report.py > {log} 2>&1"


DELIVERABLES += each("export", "results/export/{experiment}/seed{seed}")
for TABLE in EVALUATION:
    DELIVERABLES += each(TABLE, f"{EVALUATED}/metrics.json")
DELIVERABLES.append("results/report/report.html")
