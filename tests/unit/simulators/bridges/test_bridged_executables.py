"""Third-party environments as executables: their steps equal their steps in process."""

import os
import subprocess
import sys
import zipfile

import numpy as np
import pytest
from interpreter import python

from pipeline.envs.in_process import InProcessEnvironment
from pipeline.envs.unity import UnityEnvironment
from pipeline.errors import StageError
from pipeline.simulators import registry
from pipeline.simulators.pack import pack

pytestmark = pytest.mark.slow

CARTPOLE = ("gymnasium", {"id": "CartPole-v1", "n_agents": 3})
TICTACTOE = (
    "pettingzoo",
    {"id": "pettingzoo.classic.tictactoe_v3", "n_agents": 2, "teams": "index"},
)
TAG = ("pettingzoo", {"id": "mpe2.simple_tag_v3", "n_agents": 2})


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """Let executables unpack into a folder of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIPELINE_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
        yield


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    builds = {}

    def build(name, options):
        key = options["id"]
        if key not in builds:
            builds[key] = pack(name, tmp_path_factory.mktemp("built") / "environment", **options)
        return builds[key]

    return build


def numbers(steps, spec):
    """Return everything in the steps of a behavior; without masks all choices are allowed."""
    n, branches = len(steps[0]), spec.action_spec.discrete_branches
    masks = steps[0].action_mask or [np.zeros((n, size), np.bool_) for size in branches]
    return [masks, *([batch.agent_id, batch.reward, batch.obs] for batch in steps)]


@pytest.mark.parametrize("wanted", [CARTPOLE, TICTACTOE, TAG], ids=lambda w: w[1]["id"])
def test_bridged_executable_sends_the_same_steps_as_its_environment_in_process(built, wanted):
    name, options = wanted
    local = InProcessEnvironment(registry.make(name, seed=11, **options))
    rng = np.random.default_rng(2)
    n_ended = 0
    with UnityEnvironment(built(*wanted), seed=11, no_graphics=True) as remote:
        for env in (local, remote):
            env.reset()
        for _ in range(150):
            assert sorted(remote.behavior_specs) == sorted(local.behavior_specs)
            for behavior, spec in local.behavior_specs.items():
                assert remote.behavior_specs[behavior].action_spec == spec.action_spec
                steps = local.get_steps(behavior)
                sent = numbers(remote.get_steps(behavior), spec)
                np.testing.assert_equal(sent, numbers(steps, spec))
                n_ended += len(steps[1])
                action = spec.action_spec.random_action(len(steps[0]), rng)
                for env in (local, remote):
                    env.set_actions(behavior, action)
            for env in (local, remote):
                env.step()
    local.close()
    assert n_ended > 5


def test_two_builds_of_an_environment_have_equal_bytes_and_contain_no_path_of_the_machine(
    built, tmp_path
):
    first = built(*CARTPOLE)
    rebuilt = pack("gymnasium", tmp_path / "again", **CARTPOLE[1])
    assert rebuilt.read_bytes() == first.read_bytes()
    assert rebuilt.stat().st_mode & 0o777 == 0o755
    other = pack("gymnasium", tmp_path / "other", id="CartPole-v1", n_agents=4)
    assert other.read_bytes() != first.read_bytes()
    with zipfile.ZipFile(first) as archive:
        names = archive.namelist()
        assert sys.prefix.encode() not in archive.read("executable.json")
    assert "lib/gymnasium/envs/classic_control/cartpole.py" in names
    assert not any(name.startswith(("lib/torch/", "lib/grpc/", "lib/mujoco/")) for name in names)


def test_executable_of_a_third_party_environment_describes_itself_with_only_python_installed(
    built, tmp_path
):
    completed = subprocess.run(  # noqa: S603  # built by the test
        [str(built(*TAG)), "--describe", "--num-agents", "1"],
        env={
            "PIPELINE_PYTHON": sys.executable,
            "PIPELINE_CACHE": os.environ["PIPELINE_CACHE"],
            "PATH": "/usr/bin:/bin",
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert completed.stdout == (
        "adversary?team=0: 3 agents ask for a decision first\n"
        "  observes  observation: vector 16\n"
        "  acts      branches of (5,) choices\n"
        "\n"
        "agent?team=0: 1 agents ask for a decision first\n"
        "  observes  observation: vector 14\n"
        "  acts      branches of (5,) choices\n"
        "\n"
        "gives no state: PettingZooSimulator does not give its state; give the environment "
        "get_state() and set_state(state)\n"
    )


OWN = """
import gymnasium
from own_games.rules import LENGTH

class Own(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 1, (2,))
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        self.n = 0
        return self.observation_space.sample() * 0, {}

    def step(self, action):
        self.n += 1
        if FAILS:
            raise RuntimeError("the physics broke")
        return self.observation_space.sample() * 0, 1.0, self.n == LENGTH, False, {}

gymnasium.register("Own-v0", entry_point=Own)
"""


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    def write(fails):
        folder = tmp_path / "own_games"
        folder.mkdir()
        (folder / "__init__.py").write_text(OWN.replace("FAILS", str(fails)))
        (folder / "rules.py").write_text("LENGTH = 3\n")
        monkeypatch.syspath_prepend(str(tmp_path))

    return write


def test_environment_in_a_folder_of_the_user_is_packed_with_that_folder(
    own_module, tmp_path, monkeypatch
):
    own_module(fails=False)
    target = pack("gymnasium", tmp_path / "built" / "own", id="own_games:Own-v0", n_agents=1)
    with zipfile.ZipFile(target) as archive:
        names = {name for name in archive.namelist() if "own_games" in name}
    assert names == {"lib/own_games/__init__.py", "lib/own_games/rules.py"}
    with UnityEnvironment(target, no_graphics=True) as env:
        env.reset()
        for _ in range(3):
            env.step()
        assert len(env.get_steps("Own-v0?team=0")[1]) == 1


@pytest.mark.parametrize("source", ["gymnasium", "pettingzoo"])
def test_environment_module_in_the_current_folder_is_found(own_module, source, tmp_path):
    """As for the installed command: Python itself searches this folder only for `python -m`."""
    own_module(fails=False)
    if source == "pettingzoo":
        (tmp_path / "own_duel_v0.py").write_text("from mpe2.simple_v3 import env, parallel_env\n")
    env_id = {"gymnasium": "own_games:Own-v0", "pettingzoo": "own_duel_v0"}[source]
    path = os.pathsep.join(entry for entry in sys.path if entry and entry != str(tmp_path))
    command = [
        "-P",
        "-m",
        "pipeline.cli.main",
        "env",
        "build",
        f"{source}:{env_id}",
        "-o",
        "built/own",
    ]
    python(*command, cwd=tmp_path, PYTHONPATH=path)
    with zipfile.ZipFile(tmp_path / "built/own") as archive:
        assert any(name.startswith("lib/own_") for name in archive.namelist())


def test_environment_that_fails_while_it_runs_is_not_packed(own_module, tmp_path):
    own_module(fails=True)
    with pytest.raises(StageError, match=r"own_games:Own-v0: fails .*the physics broke"):
        pack("gymnasium", tmp_path / "own", id="own_games:Own-v0")
    assert not (tmp_path / "own").exists()
