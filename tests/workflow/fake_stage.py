"""Stands for every stage: writes the declared outputs at once, from digests of the inputs.

Copied over the scripts of a copy of the project, so that the engines' decisions can be tested
without training anything.
"""

import hashlib
import json
import sys
from pathlib import Path

import yaml

stage, arguments = Path(__file__).stem, sys.argv[1:]
name = arguments[0] if arguments else ""
run = f"{name}/seed{arguments[2]}" if len(arguments) == 3 else name
params = yaml.safe_load(Path("params.yaml").read_text())
tables = yaml.safe_load(Path("workflow/runs.yaml").read_text())["runs"]
entry = {}
if len(arguments) == 3:
    key = f"{name.replace('/', '-')}-{arguments[2]}"
    entry = next(t[key] for t in tables.values() if "values" in t.get(key, {}) or key in t)
experiment = params["experiments"].get(entry.get("base"), {})
env = experiment.get("environment")
FOLDERS = {
    "env": [],
    "demos": [],
    "pretrain": ["data/demos"],
    "train": ["build/env/" + str(env)],
    "export": [f"results/train/{run}"],
    "evaluate": [f"results/export/{run}"],
    "sweep": [f"results/evaluate/{name}"],
    "report": ["results/evaluate"],
}
LEARNED = ("policy.pt", "metrics.json", "progress.csv")
TABLES = ("comparison.csv", "improvement.csv", "learning.csv")
FILES = {
    "pretrain": LEARNED,
    "train": LEARNED,
    "export": ("model.onnx",),
    "evaluate": ("returns.png", "episodes.csv", "metrics.json"),
    "sweep": ("best.json", "metrics.json", "trials.csv"),
    "report": ("report.html", "report.md", "figures/a.png", *TABLES, "summary.json"),
}
OUTPUTS = {
    "env": [f"build/env/{name}/program"],
    "demos": [f"data/demos/{name}.demo", f"results/demos/{name}.json"],
} | {stage: [f"results/{stage}/{run}/{file}" for file in files] for stage, files in FILES.items()}
digest = hashlib.sha256(json.dumps([stage, arguments]).encode())
if stage == "train":
    digest.update(json.dumps(experiment["overrides"]).encode())
    digest.update(json.dumps(entry.get("values")).encode())
    digest.update(Path(experiment["trainer"]).read_bytes())
    if "chosen" in entry:
        digest.update(Path(entry["chosen"]).read_bytes())
if stage == "evaluate":
    digest.update(json.dumps(experiment["evaluation"]).encode())
for folder in FOLDERS[stage]:
    for file in sorted(p for p in Path(folder).rglob("*") if p.is_file()):
        if not file.name.startswith("."):
            digest.update(file.read_bytes())
for output in OUTPUTS[stage]:
    path = Path(output)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"digest": digest.hexdigest()}))
with Path("ran.log").open("a") as log:
    log.write(" ".join([stage, *arguments]) + "\n")
