# Environments, and demonstrations recorded in them.
rule env:
    input:
        "constraints.txt",
        sources(
            "env",
            "arrays.py",
            "protocol",
            "settings",
            "simulators",
            "stages/bridged.py",
        ),
    output:
        directory("build/env/{name}"),
    log:
        "logs/env/{name}.log",
    benchmark:
        "logs/env/{name}.tsv"
    wildcard_constraints:
        name=one_of(RUNS["environments"]),
    threads: 1
    params:
        watched=watched("environments.{name}"),
    message:
        "Pack the environment {wildcards.name}"
    shell:
        "python workflow/scripts/env.py {wildcards.name} > {log} 2>&1"


rule env_path:
    input:
        "constraints.txt",
        lambda wildcards: RUNS["path_environments"][wildcards.name]["path"],
        sources(
            "env",
            "arrays.py",
            "protocol",
            "settings",
            "simulators",
            "stages/bridged.py",
        ),
    output:
        directory("build/env/{name}"),
    log:
        "logs/env/{name}.log",
    benchmark:
        "logs/env/{name}.tsv"
    wildcard_constraints:
        name=one_of(RUNS["path_environments"]),
    threads: 1
    params:
        watched=watched("environments.{name}"),
    message:
        "Take the build of the environment {wildcards.name}"
    shell:
        "python workflow/scripts/env.py {wildcards.name} > {log} 2>&1"


rule demos:
    input:
        lambda wildcards: (
            f"build/env/{RUNS['demonstrations'][wildcards.name]['environment']}"
        ),
        sources(
            "demos",
            "envs",
            "protocol",
            "settings",
            "simulators",
            "stages/executable.py",
        ),
    output:
        "data/demos/{name}.demo",
        report("results/demos/{name}.json", category="Demonstrations"),
    log:
        "logs/demos/{name}.log",
    benchmark:
        "logs/demos/{name}.tsv"
    wildcard_constraints:
        name=one_of(RUNS["demonstrations"]),
    threads: 1
    params:
        watched=watched("demonstrations.{name}"),
    message:
        "Record the demonstrations {wildcards.name}"
    shell:
        "python workflow/scripts/demos.py {wildcards.name} > {log} 2>&1"
