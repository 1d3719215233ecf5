"""Reports of Snakemake users: reruns after another notation of a value, results of DVC."""

import json
from pathlib import Path

import pytest

from pipeline.cli import run
from pipeline.dag.engines import State
from pipeline.settings.project.params import load_params

TRAINER = """\
behaviors:
  Ball:
    trainer_type: ppo
    max_steps: 10000
    hyperparameters: {batch_size: 64, buffer_size: 640}
"""
PARAMS = """\
runtime:
  torch_threads: 1
  device: cpu
environments:
  ball:
    source: builtin
    args: []
  cart:
    source: gymnasium
    id: CartPole-v1
    copies: 4
    kwargs:
      first: 1
      second: 2.5
demonstrations:
  expert:
    environment: ball
    policy: expert
    episodes: 5
    seed: 100
experiments:
  one:
    environment: ball
    trainer: trainer.yaml
    overrides:
      behaviors.Ball.max_steps: 10000
      behaviors.Ball.hyperparameters.learning_rate: 3.0e-4
      behaviors.Ball.network_settings.normalize: true
    demonstrations: expert
    pretrain:
      epochs: 2
      batch_size: 64
      learning_rate: 1.0e-3
    seeds:
      - 1
    stages: [pretrain, train, export, evaluate]
    evaluation:
      episodes: 4
      seed: 10000
"""
DOTTED = """\
      behaviors.Ball.max_steps: 10000
      behaviors.Ball.hyperparameters.learning_rate: 3.0e-4
      behaviors.Ball.network_settings.normalize: true
"""
NESTED = """\
      behaviors: {Ball: {network_settings: {normalize: true}, hyperparameters:
        {learning_rate: 0.0003}, max_steps: 1e4}}
"""
SPELLINGS = {
    "a whole number with a point": ("torch_threads: 1\n", "torch_threads: 1.0\n"),
    "a whole number in quotes": ("torch_threads: 1\n", "torch_threads: '1'\n"),
    "a text in quotes": ("device: cpu\n", 'device: "cpu"\n'),
    "a default of the runtime": ("device: cpu\n", "device: cpu\n  deterministic: machine\n"),
    "epochs with a point": ("epochs: 2\n", "epochs: 2.0\n"),
    "a rate without an exponent": ("rate: 1.0e-3\n", "rate: 0.001\n"),
    "a rate in quotes": ("rate: 1.0e-3\n", "rate: '1e-3'\n"),
    "an override as 1e4": ("max_steps: 10000\n", "max_steps: 1e4\n"),
    "an override in quotes": ("max_steps: 10000\n", "max_steps: '10000'\n"),
    "an override's rate": ("rate: 3.0e-4\n", "rate: 3e-4\n"),
    "a truth value": ("normalize: true\n", "normalize: True\n"),
    "nested and in another order": (DOTTED, NESTED),
    "half dotted": ("behaviors.Ball.max_steps: 10000\n", "behaviors.Ball: {max_steps: 10000.0}\n"),
    "episodes of an evaluation": ("episodes: 4\n", "episodes: 4.0\n"),
    "a default of an evaluation": ("episodes: 4\n", "episodes: 4\n      video: false\n"),
    "a seed as 1e4": ("seed: 10000\n", "seed: 1e4\n"),
    "episodes to record": ("episodes: 5\n", "episodes: 5.\n"),
    "null for a key that is absent": ("seed: 100\n", "seed: 100\n    file: null\n"),
    "an empty list left out": ("    args: []\n", ""),
    "another order of keys": ("source: builtin\n    args: []\n", "args: []\n    source: builtin\n"),
    "keywords": ("first: 1\n      second: 2.5\n", "second: 25e-1\n      first: 1.0\n"),
    "copies": ("copies: 4\n", "copies: 4.0\n"),
    "a seed of training": ("      - 1\n", "      - 1.0\n"),
}
OTHER_VALUES = {
    "threads": ("torch_threads: 1\n", "torch_threads: 2\n"),
    "steps": ("max_steps: 10000\n", "max_steps: 10001\n"),
    "a truth value": ("normalize: true\n", "normalize: false\n"),
    "a truth value and a number": ("first: 1\n", "first: true\n"),
    "a text and a number": ("first: 1\n", "first: '1'\n"),
}


def watched(folder: Path, text: str) -> str:
    """Return the text that Snakemake compares with its record; order and spelling matter."""
    (folder / "trainer.yaml").write_text(TRAINER)
    (folder / "params.yaml").write_text(text)
    return json.dumps(load_params(folder / "params.yaml").in_one_spelling())


def edited(old: str, new: str) -> str:
    assert PARAMS.count(old) == 1, old
    return PARAMS.replace(old, new)


@pytest.mark.parametrize("edit", SPELLINGS.values(), ids=SPELLINGS)
def test_other_spelling_of_a_value_does_not_change_the_parameters_that_snakemake_compares(
    edit: tuple[str, str], tmp_path: Path
):
    """snakemake#2212, snakemake#1694."""
    assert watched(tmp_path, edited(*edit)) == watched(tmp_path, PARAMS)


@pytest.mark.parametrize("edit", OTHER_VALUES.values(), ids=OTHER_VALUES)
def test_changed_value_changes_the_parameters_that_snakemake_compares(edit, tmp_path):
    assert watched(tmp_path, edited(*edit)) != watched(tmp_path, PARAMS)


def test_sweep_values_in_other_notation_keep_the_same_proposals(tmp_path: Path):
    sweep = """\
sweeps:
  sizes:
    experiment: two
    method: optuna
    runs: 3
    seed: 1
    parameters:
      behaviors.Ball.hyperparameters.batch_size: [32, 64]
    seeds: [5]
"""
    head, tail = PARAMS.split("    demonstrations: expert\n")
    text = head.replace("  one:", "  two:") + tail.replace("[pretrain, train", "[train") + sweep
    text = text.replace("[32, 64]", "{}")
    searches = set()
    for values in ("[32, 64]", "[32.0, 6.4e1]"):
        watched(tmp_path, text.format(values))
        params = load_params(tmp_path / "params.yaml")
        searches.add(json.dumps([params.sweeps["sizes"].search(), params.sweeps["sizes"].trials()]))
    assert len(searches) == 1


@pytest.mark.parametrize("first", [(), ("train@one-1", "export@one-1")])
def test_pipeline_run_warns_of_results_without_a_snakemake_record(
    first: tuple[str, ...], tmp_path: Path, monkeypatch, caplog
):
    """An edited setting does not rerun such results unless dvc.lock records them."""
    state = State(pending=("report",), unrecorded=("report", *first))
    monkeypatch.setattr(run.engines, "snakemake_summary", lambda _: state)
    assert run._changed("snakemake", tmp_path, []) == ("report",)
    said = (
        "Snakemake has no record of 2 results (the first is export@one-1), because DVC made them "
        "or they were copied. For these results it notices edited files, but edited settings only "
        "if dvc.lock has the result; `pipeline sync` writes the records."
    )
    assert [record.getMessage() for record in caplog.records] == ([said] if first else [])
