"""Runs with one seed give the same bytes of checkpoints, ONNX files and metrics."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from answers import Answer
from interpreter import python
from remembering import Cue
from toys import Both, Chase, Crowd, Quadrant, Wish

import pipeline
from pipeline import trainer
from pipeline.dag.stages.export import publish
from pipeline.demos.demo_file import writing_demo
from pipeline.envs.in_process import InProcessEnvironment, SimulatorSource
from pipeline.settings import load_run_settings
from pipeline.simulators import registry
from pipeline.simulators.pack import pack
from pipeline.tracking.base import Sink
from pipeline.tracking.curve_csv import CsvSink
from pipeline.trainer import pretrain
from pipeline.trainer.checkpoints.file import digest, load_checkpoint

WAIT_S = 300


class Recorder(Sink):
    """Records the metrics without times."""

    def __init__(self) -> None:
        self.rows: list[str] = []

    def on_summary(self, behavior, values, step):
        untimed = {tag: value for tag, value in values.items() if not tag.startswith("Time/")}
        self.rows.append(json.dumps([behavior, step, untimed], sort_keys=True))


def settings(*names, **changes):
    behavior = {
        "trainer_type": "ppo",
        "hyperparameters": {"batch_size": 32, "buffer_size": 128},
        "network_settings": {"hidden_units": 16, "num_layers": 2, "normalize": True},
        "max_steps": 600,
        "time_horizon": 8,
        "summary_freq": 100,
        "checkpoint_interval": 250,
    }
    return {"behaviors": dict.fromkeys(names or ("Toy",), behavior | changes)}


def artifacts(folder: Path) -> dict[str, bytes]:
    """Return the bytes of every file under `folder`, by relative name."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def trained(folder: Path, environments, configuration, *, seed=1, **options):
    """Train and export; return the files in `folder`, the metrics and the final numbers."""
    if callable(environments):
        environments = [InProcessEnvironment(simulator) for simulator in environments()]
    recorder = Recorder()
    sinks = [recorder, CsvSink(folder / "progress.csv")]
    result = pipeline.train(
        environments, configuration, seed=seed, run_dir=folder, sinks=sinks, **options
    )
    for outcome in result.behaviors.values():
        publish(outcome.checkpoint, folder / "export")
    numbers = {name: outcome.numbers() for name, outcome in result.behaviors.items()}
    return artifacts(folder), recorder.rows, numbers


ENVIRONMENTS = {
    "continuous": lambda: [Chase(seed=3, n_agents=4)],
    "hybrid, two workers": lambda: [Both(seed=seed, n_agents=3) for seed in (1, 2)],
    "visual": lambda: [Quadrant(seed=3, n_agents=4)],
    "goal signal": lambda: [Wish(seed=3, n_agents=4)],
    "entities": lambda: [Answer("continuous", "entities", seed=3, n_agents=4)],
    "balance_ball": lambda: [registry.make("balance_ball", seed=3, n_agents=4)],
    "two behaviors, agents that come and go": lambda: [Crowd(seed=seed) for seed in (1, 2)],
    "memory": lambda: [Cue(seed=3), Cue(seed=4)],
}
NAMES = {"balance_ball": ["3DBall"], "two behaviors, agents that come and go": ["Mood", "Choice"]}


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_same_seed_gives_the_same_checkpoints_onnx_files_and_metrics(name, tmp_path):
    configuration = settings(*NAMES.get(name, ()))
    if name == "memory":
        network = configuration["behaviors"]["Toy"]["network_settings"]
        network["memory"] = {"sequence_length": 3, "memory_size": 8}
    first, second, other = (
        trained(tmp_path / label, ENVIRONMENTS[name], configuration, seed=seed)
        for label, seed in (("one", 5), ("two", 5), ("other", 6))
    )
    for behavior in NAMES.get(name, ["Toy"]):
        assert f"{behavior}/checkpoint.pt" in first[0]
        assert f"export/{behavior}.onnx" in first[0]
    assert len(first[0]) > 3
    assert first[0].keys() == second[0].keys()
    assert [file for file in first[0] if first[0][file] != second[0][file]] == []
    assert first[1:] == second[1:]
    assert len(first[1]) > 3
    assert other[1] != first[1]
    telling = [file for file in other[0] if Path(file).suffix in (".pt", ".onnx", ".csv")]
    assert [file for file in telling if other[0][file] in first[0].values()] == []


@pytest.mark.usefixtures("private_cache")
def test_a_simulator_in_this_process_gives_the_bytes_of_its_executable(tmp_path):
    """`pipeline learn` chooses between the two, and a resumed run may choose otherwise."""
    configuration = settings("3DBall")
    source = SimulatorSource("balance_ball", {"n_agents": 4})
    program = pack("balance_ball", tmp_path / "balance_ball", n_agents=4)
    runs = {}
    for first, second in ((source, program), (program, source), (program, program)):
        folder = tmp_path / f"{len(runs)}"
        for env, stop, resume in ((first, 300, False), (second, 600, True)):
            configuration["behaviors"]["3DBall"]["max_steps"] = stop
            run = load_run_settings(None, overrides=configuration)
            trainer.train(trainer.JobSpec(env, run, seed=1, run_dir=folder, resume=resume))
        runs[folder] = {
            name: content for name, content in artifacts(folder).items() if name.endswith(".pt")
        }
    first, *others = runs.values()
    assert others == [first] * 2


def test_changes_of_global_random_streams_and_thread_numbers_do_not_change_a_run(tmp_path):
    runs = []
    for label in ("one", "two"):
        runs.append(trained(tmp_path / label, ENVIRONMENTS["hybrid, two workers"], settings()))
        torch.set_num_threads(2)
        torch.rand(7)
        np.random.rand(5)  # noqa: NPY002  # what a user's code may do
    assert runs[0] == runs[1]


def test_same_seed_gives_the_same_pretrained_policy(tmp_path):
    spec = Chase.spec
    rng = np.random.default_rng(0)
    with writing_demo(tmp_path / "d.demo", "Toy?team=0", spec) as writer:
        writer.append(
            obs=[rng.normal(size=(90, 4)).astype("float32")],
            actions=spec.action_spec.random_action(90, rng),
            reward=rng.normal(size=90).astype("float32"),
            done=rng.random(90) < 0.1,
        )
    contents = [
        pretrain(
            [tmp_path / "d.demo"],
            load_run_settings(None, overrides=settings()),
            seed=seed,
            run_dir=tmp_path / label,
            epochs=3,
            batch_size=16,
            learning_rate=1e-3,
        ).checkpoint.read_bytes()
        for label, seed in (("one", 1), ("two", 1), ("other", 2))
    ]
    assert contents[0] == contents[1]
    assert contents[0] != contents[2]


def test_separate_processes_with_one_seed_and_two_environments_give_the_same_bytes(tmp_path):
    built = pack("grid_world", tmp_path / "grid_world", n_agents=4)
    network = {"hidden_units": 16, "num_layers": 2}
    configuration = json.dumps(settings("GridWorld", network_settings=network, time_horizon=5))
    runs = []
    for label, seed in (("one", 5), ("two", 5), ("other", 6)):
        own = {"PYTHONHASHSEED": str(len(runs)), "PIPELINE_CACHE": str(tmp_path / "cache")}
        folder = tmp_path / label
        python(__file__, built, folder, configuration, seed, timeout=WAIT_S, **own)
        runs.append(artifacts(folder))
    first, second, other = runs
    written = {"GridWorld/checkpoint.pt", "export/GridWorld.onnx", "progress.csv"}
    assert written | {"outcome.json"} <= first.keys()
    assert first.keys() == second.keys()
    assert [name for name in first if first[name] != second[name]] == []
    assert [name for name in written if first[name] == other[name]] == []


@pytest.mark.usefixtures("private_cache")
def test_compressed_images_give_the_same_weights_as_uncompressed_images(packed, tmp_path):
    environment = packed("grid_world", tmp_path / "grid_world")
    numbers = {"batch_size": 32, "buffer_size": 256, "num_epoch": 2}
    network = {"hidden_units": 16, "num_layers": 1}
    limits = {"max_steps": 1500, "time_horizon": 5}
    behavior = {"hyperparameters": numbers, "network_settings": network, **limits}
    digests = set()
    for args in ([], ["--compress"]):
        job = trainer.JobSpec(
            environment,
            load_run_settings(None, overrides=settings("GridWorld", **behavior)),
            seed=3,
            run_dir=tmp_path / "-".join(["run", *args]),
            env_args=args,
            log_folder=tmp_path / "logs",
        )
        result = trainer.train(job).behaviors["GridWorld"]
        assert result.n_updates >= 5
        digests.add(digest(load_checkpoint(result.checkpoint)["learner"]["algorithm"]))
        assert "Ignored" not in (tmp_path / "logs" / "Player-0.log").read_text()
    assert len(digests) == 1


def main(executable: str, folder: str, configuration: str, seed: str) -> None:
    """Train in two processes of an executable, and write the outcome as well."""
    torch.set_num_threads(1)
    path, content = Path(folder), json.loads(configuration)
    *_, numbers = trained(path, Path(executable), content, seed=int(seed), num_envs=2)
    (path / "outcome.json").write_text(json.dumps(numbers, sort_keys=True))


if __name__ == "__main__":
    main(*sys.argv[1:])
