# Environments, and demonstrations recorded in them.
rule env:
    input:
        str(pinned(Path())),
        SOURCES["env"],
    output:
        directory("build/env/{name}"),
    log:
        "logs/env/{name}.log",
    benchmark:
        "logs/env/{name}.tsv"
    wildcard_constraints:
        name=one_of(RUNS["environments"]),
    priority: 6
    conda:
        "../envs/pipeline.yaml"
    threads: 1
    params:
        watched=watched("environments.{name}", "runs.environments.{name}"),
    message:
        "Make the environment {wildcards.name}"
    shell:
        "python workflow/scripts/env.py {wildcards.name} > {log} 2>&1"


use rule env as env_path with:
    input:
        str(pinned(Path())),
        lambda wildcards: spelled_out(RUNS["path_environments"][wildcards.name]["path"]),
        SOURCES["env"],
    wildcard_constraints:
        name=one_of(RUNS["path_environments"]),
    params:
        watched=watched("environments.{name}"),
    message:
        "Take the build of the environment {wildcards.name}"


use rule env as env_unity with:
    input:
        str(pinned(Path())),
        lambda wildcards: spelled_out(
            *(
                RUNS["unity_environments"][wildcards.name][part]
                for part in ("assets", "packages", "settings")
            )
        ),
        SOURCES["env"],
    wildcard_constraints:
        name=one_of(RUNS["unity_environments"]),
    params:
        watched=watched("environments.{name}"),
    message:
        "Build the Unity project of the environment {wildcards.name}"


rule demos:
    input:
        lambda wildcards: (
            f"build/env/{RUNS['demonstrations'][wildcards.name]['environment']}"
        ),
        SOURCES["demos"],
    output:
        "data/demos/{name}.demo",
        report("results/demos/{name}.json", category="Demonstrations"),
    log:
        "logs/demos/{name}.log",
    benchmark:
        "logs/demos/{name}.tsv"
    wildcard_constraints:
        name=one_of(RUNS["demonstrations"]),
    priority: 6
    conda:
        "../envs/pipeline.yaml"
    threads: 1
    params:
        watched=watched("demonstrations.{name}"),
    message:
        "Record the demonstrations {wildcards.name}"
    shell:
        "python workflow/scripts/demos.py {wildcards.name} > {log} 2>&1"


use rule demos as demos_file with:
    input:
        lambda wildcards: RUNS["file_demonstrations"][wildcards.name]["file"],
        SOURCES["demos"],
    wildcard_constraints:
        name=one_of(RUNS["file_demonstrations"]),
    message:
        "Take the demonstrations {wildcards.name}"


for TABLE in ("environments", "path_environments", "unity_environments"):
    DELIVERABLES += [f"build/env/{name}" for name in RUNS[TABLE]]
for TABLE in ("demonstrations", "file_demonstrations"):
    DELIVERABLES += [f"data/demos/{name}.demo" for name in RUNS[TABLE]]
