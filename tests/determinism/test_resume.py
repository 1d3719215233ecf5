"""A killed and resumed run equals the uninterrupted run, array by array."""

import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from forked import forking
from interpreter import variables
from toys import Both

from pipeline.demos.demo_file import writing_demo
from pipeline.trainer.checkpoints.file import load_checkpoint, save_checkpoint

WAIT_S = 300
PROGRAM = Path(__file__).with_name("killed_training.py")


def run(folder: Path, name: str, *, updates: int, kill_at: int = 0, how: str = "") -> int:
    """Train until `updates` updates, or until the process is killed after `kill_at` of them."""
    return python(folder, PROGRAM, folder, name, updates, kill_at, how)


def python(folder: Path, *program: object) -> int:
    """Run a program, with another hash seed if the folder is not called `whole`."""
    modules = ("torch", "pytest", "pipeline.trainer.api", "pipeline.simulators.registry")
    interpreter = forking(*modules, hash_seed="1" if folder.name == "whole" else "2")
    completed = interpreter.run(*map(str, program), timeout=WAIT_S, env=variables())
    assert completed.returncode <= 0, completed.stderr
    return completed.returncode


def leaves(value, path=""):
    """Yield every array and plain value of a state with its key path."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, f"{path}/{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from leaves(item, f"{path}/{index}")
    else:
        yield path, value.numpy() if isinstance(value, torch.Tensor) else value


def final_state(folder: Path) -> dict:
    (file,) = folder.glob("*/checkpoint.pt")
    return dict(leaves(load_checkpoint(file)))


def assert_equal_states(first: dict, second: dict) -> None:
    assert first.keys() == second.keys()
    differing = [key for key in first if not np.array_equal(first[key], second[key])]
    assert differing == []


def assert_equal_files(first: Path, second: Path) -> None:
    """Assert that all files of two runs have the same bytes."""
    first_files, second_files = (
        {p.relative_to(folder): p.read_bytes() for p in folder.glob("*/*") if p.suffix != ".log"}
        for folder in (first, second)
    )
    assert len(first_files) > 1
    assert first_files.keys() == second_files.keys()
    assert [name for name in first_files if first_files[name] != second_files[name]] == []


def killed_and_resumed(
    folder: Path, name: str, how: str = "", *, updates: int = 8, kill_at: int = 5
) -> tuple[dict, dict]:
    """Assert that a killed and resumed run equals the whole run; return the state of the whole run,
    and the state at the kill.
    """
    uninterrupted, killed = folder / "whole", folder / "killed"
    assert run(uninterrupted, name, updates=updates, how=how) == 0
    assert run(killed, name, updates=updates, kill_at=kill_at, how=how) == -signal.SIGKILL
    halfway = final_state(killed)
    assert run(killed, name, updates=updates, how=f"{how} resume") == 0
    assert_equal_states(final_state(uninterrupted), final_state(killed))
    assert_equal_files(uninterrupted, killed)
    return final_state(uninterrupted), halfway


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("Chase", ""),
        ("Both", ""),
        ("Forbidden", ""),
        ("balance_ball", ""),
        ("grid_world", ""),
        ("balance_ball", "lessons"),
        ("collector", ""),
        ("couriers", ""),
        ("push_together", ""),
        ("push_together", "poca"),
        ("couriers", "poca"),
        ("push_together", "poca memory"),
        ("balance_ball", "threaded"),
        ("grid_world", "threaded"),
        ("balance_ball", "lessons threaded"),
        ("push_together", "poca threaded"),
        ("balance_ball", "threaded compiled"),
        ("push_together", "poca threaded long"),
        ("Cue", "memory"),
        ("Level", "memory"),
        ("Cue", "memory threaded long"),
    ],
)
def test_run_killed_halfway_and_resumed_equals_the_uninterrupted_run(name, how, tmp_path):
    uninterrupted, killed = killed_and_resumed(tmp_path, name, how)
    assert killed["/learner/n_updates"] == 4
    assert uninterrupted["/learner/n_updates"] == 8
    assert any(key.startswith("/experience/open") for key in uninterrupted)
    assert len([key for key in uninterrupted if isinstance(uninterrupted[key], np.ndarray)]) > 30
    if "lessons" in how:
        assert 1 <= killed["/run/lessons/curriculum/lessons/mass"] < 5
        assert uninterrupted["/run/lessons/curriculum/lessons/mass"] == 5
    if how.startswith("memory"):
        assert np.abs(uninterrupted["/experience/memories"]).max() > 0.01


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("balance_ball", ""),
        ("balance_ball", "four lessons"),
        ("couriers", "four threaded"),
        ("push_together", "four poca memory"),
        ("balance_ball", "sac"),
        ("collector", "four xqc threaded"),
    ],
)
def test_killed_and_resumed_run_with_an_executable_equals_the_uninterrupted_run(
    name, how, packed, tmp_path
):
    """Each process of the executable sends its state over a side channel and gets it back."""
    build = str(packed(name, tmp_path / name, n_agents=6))
    uninterrupted, killed = killed_and_resumed(tmp_path, build, how, kill_at=6)
    assert 3 <= killed["/learner/n_updates"] <= 5
    assert any(key.startswith("/experience/open") for key in uninterrupted)


def test_saving_does_not_change_a_run_with_groups_of_executables(packed, tmp_path):
    """Saving waits for all groups, but does not change the order in which they get actions."""
    build = str(packed("balance_ball", tmp_path / "balance_ball", n_agents=6))
    for how in ("four", "four rarely"):
        assert run(tmp_path / how, build, updates=4, how=how) == 0
    assert_equal_states(final_state(tmp_path / "four"), final_state(tmp_path / "four rarely"))


def test_stopped_and_resumed_run_equals_the_uninterrupted_run(packed, tmp_path):
    """An executable gets one more step, with actions that do not count, to send its state."""
    build = str(packed("balance_ball", tmp_path / "balance_ball", n_agents=6))
    assert run(tmp_path / "whole", build, updates=8, how="four") == 0
    for updates in (3, 5, 8):
        how = "four" if updates == 3 else "four resume"
        assert run(tmp_path / "stopped", build, updates=updates, how=how) == 0
    assert_equal_states(final_state(tmp_path / "whole"), final_state(tmp_path / "stopped"))
    assert_equal_files(tmp_path / "whole", tmp_path / "stopped")


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("Chase", "sac"),
        ("Both", "sac"),
        ("Forbidden", "sac"),
        ("Level", "sac memory"),
        ("Both", "sac threaded"),
        ("Both", "sac compiled"),
        ("Chase", "xqc"),
        ("balance_ball", "xqc lessons"),
        ("Both", "xqc threaded compiled"),
        ("Both", "xqc rnd"),
        ("grid_world", "xqc threaded"),
    ],
)
def test_resumed_run_with_sac_or_xqc_equals_the_uninterrupted_run(name, how, tmp_path):
    """The state includes an overwritten replay, the noise, and the number of gradient steps."""
    uninterrupted, _ = killed_and_resumed(tmp_path, name, how, updates=12, kill_at=7)
    assert uninterrupted["/learner/step"] > 90  # more rows than the replay holds
    first_replay, second_replay = (
        next((tmp_path / part).glob("*/replay-*.npz")) for part in ("whole", "killed")
    )
    assert first_replay.read_bytes() == second_replay.read_bytes()


@pytest.mark.parametrize(
    ("name", "how", "kept"),
    [
        ("Both", "sac n_steps=3", ""),
        ("Both", "sac decoupled_entropy=true", ""),
        ("Both", "sac target_sigma=0.15", ""),
        ("Both", "sac held_noise=4", "/experience/memories"),
        ("Both", "sac rnd reward_normalization=true", "/learner/algorithm/reward_scale/count"),
        ("Both", "threaded recompute_advantages=true", ""),
        ("Both", "rnd return_normalization=true", "/learner/algorithm/return_scale/count"),
        ("Both", "learning_rate_schedule=constant desired_kl=0.01", ""),
        (
            "push_together",
            "poca recompute_advantages=true return_normalization=true "
            "learning_rate_schedule=constant desired_kl=0.01",
            "/learner/algorithm/return_scale/count",
        ),
    ],
)
def test_resumed_run_with_settings_that_store_additional_state_equals_the_uninterrupted_run(
    name, how, kept, tmp_path
):
    uninterrupted, _ = killed_and_resumed(tmp_path, name, how)
    assert not kept or np.any(uninterrupted[kept])
    if "desired_kl" in how:
        (rate,) = (value for key, value in uninterrupted.items() if key.endswith("/lr"))
        assert rate not in (0.0, 3e-4)


@pytest.mark.parametrize("how", ["sac", "xqc threaded"])
def test_resumed_run_with_steps_per_update_auto_equals_a_run_with_the_chosen_number(how, tmp_path):
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    auto = f"{how} auto"
    assert run(killed, "balance_ball", updates=6, kill_at=3, how=auto) == -signal.SIGKILL
    chosen = final_state(killed)["/settings/hyperparameters/steps_per_update"]
    assert run(killed, "balance_ball", updates=6, how=f"{auto} resume") == 0
    assert run(whole, "balance_ball", updates=6, how=f"{how} {chosen}") == 0
    assert_equal_states(final_state(whole), final_state(killed))
    assert_equal_files(whole, killed)


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("balance_ball", "threaded"),
        ("push_together", "poca threaded long"),
        ("Both", "sac threaded"),
    ],
)
def test_saving_during_an_update_does_not_change_the_run(name, how, tmp_path):
    """One run is saved after each update, the other only at its end."""
    assert run(tmp_path / "whole", name, updates=8, how=how) == 0
    assert run(tmp_path / "seldom", name, updates=8, how=f"{how} rarely") == 0
    uninterrupted, seldom = final_state(tmp_path / "whole"), final_state(tmp_path / "seldom")
    assert uninterrupted["/learner/algorithm/threaded/steps"] > 0
    assert_equal_states(uninterrupted, seldom)


@pytest.mark.parametrize(
    "how",
    [
        "curiosity",
        "rnd",
        "gail",
        "gail memory",
        "gail threaded",
        "xqc curiosity",
        "xqc gail threaded",
    ],
)
def test_resumed_run_with_a_learned_reward_equals_the_uninterrupted_run(how, tmp_path):
    with writing_demo(tmp_path / "expert.demo", "Toy?team=0", Both.spec) as writer:
        rng = np.random.default_rng(0)
        writer.append(
            obs=[rng.normal(size=(50, 1)).astype(np.float32)],
            actions=Both.spec.action_spec.random_action(50, rng),
            reward=np.zeros(50, dtype=np.float32),
            done=np.arange(50) % 10 == 9,
        )
    uninterrupted, _ = killed_and_resumed(tmp_path, "Both", how)
    signal_keys = [key for key in uninterrupted if key.startswith("/learner/algorithm/signals/")]
    assert len([key for key in signal_keys if "optimizer/state/0/exp_avg" in key]) == 2
    assert len(signal_keys) > 10


@pytest.mark.parametrize("how", ["", "sac lost"])
def test_resumed_run_differs_without_the_state_of_the_environments_or_the_replay(how, tmp_path):
    """Shows that the comparison of the other tests can fail."""
    assert run(tmp_path / "whole", "Chase", updates=12, how=how) == 0
    assert run(tmp_path / "killed", "Chase", updates=12, kill_at=7, how=how) == -signal.SIGKILL
    (file,) = (tmp_path / "killed").glob("*/checkpoint.pt")
    if not how:
        state = load_checkpoint(file)
        save_checkpoint(file, {key: v for key, v in state.items() if key != "environments"})
    assert run(tmp_path / "killed", "Chase", updates=12, how=f"{how} resume") == 0
    assert not list(tmp_path.glob("*/*/replay-*.npz"))
    uninterrupted, resumed = final_state(tmp_path / "whole"), final_state(tmp_path / "killed")
    weights = [key for key in uninterrupted if key.startswith("/learner/algorithm/policy/actor")]
    assert not all(np.array_equal(uninterrupted[key], resumed[key]) for key in weights)
