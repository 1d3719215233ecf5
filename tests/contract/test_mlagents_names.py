"""ML-Agents' names: each has an equivalent or a reason, and code that uses them runs."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import pytest
from interpreter import python

import pipeline
from pipeline import compat
from pipeline.protocol.generated.messages import AgentInfoProto, UnityRLOutputProto

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/reference/ml-agents-names.md"


def run(code: str, *path: Path, arguments: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    return python("-c", code, *arguments, first=path, check=False)


def test_an_equivalent_is_where_the_table_says_and_every_other_name_has_a_reason():
    for name, entry in compat.NAMES.items():
        if entry.ours is not None:
            assert compat.resolve(name) is not None, name
            continue
        with pytest.raises(
            ImportError, match=r"has no equivalent: .*docs/how-to/migrating\.md"
        ) as refused:
            compat.resolve(name)
        assert len(entry.note) > 10
        assert entry.note in str(refused.value)


def test_messages_of_agents_are_decoded_as_the_reason_for_steps_from_proto_says():
    reason = compat.NAMES["mlagents_envs.rpc_utils.steps_from_proto"].note
    module, call = re.search(r"`(pipeline\S+)\.(Decoder)\(spec, name\)\.decode`", reason).groups()
    actions = pipeline.ActionSpec.create_continuous(1)
    agents = [AgentInfoProto(id=4, reward=2.0)]
    data = UnityRLOutputProto.ListAgentInfoProto(value=agents).SerializeToString()
    spec = pipeline.BehaviorSpec([], actions)
    steps, ended = getattr(import_module(module), call)(spec, "Walker").decode(data)
    assert (steps.agent_id.tolist(), steps.reward.tolist(), len(ended)) == ([4], [2.0], 0)


def row(name: str, entry: compat.Name) -> str:
    """The line of the page that a name must have."""
    return f"| `{name}` | {f'`{entry.ours}`' if entry.ours else ''} | {entry.note} |"


def test_the_page_has_every_name():
    lines = PAGE.read_text().splitlines()
    rows = [line for line in lines if line.startswith("| `mlagents")]
    assert rows == [row(name, entry) for name, entry in sorted(compat.NAMES.items())]


LISTED = Path(os.environ.get("MLAGENTS_LEARN", ROOT / ".venv-mlagents/bin/mlagents-learn"))


@pytest.mark.skipif(not LISTED.exists(), reason="`make peer` installs mlagents_envs 1.1.0")
def test_the_table_has_every_public_name_of_the_installed_mlagents_envs():
    completed = python(ROOT / "benchmarks/peer_names.py", check=False)
    assert completed.returncode == 0, completed.stdout + completed.stderr


SCRIPT = """
from pipeline import compat
compat.stand_in()
import mlagents_envs.base_env
from mlagents_envs.environment import UnityEnvironment, ActionTuple, BaseEnv
from mlagents_envs.exception import UnityException
from mlagents_envs.registry import default_registry, UnityEnvRegistry
from mlagents_envs.side_channel.side_channel import SideChannel, OutgoingMessage
from mlagents_envs.side_channel.engine_configuration_channel import EngineConfig
from mlagents_envs.envs.unity_gym_env import UnityToGymWrapper
from mlagents_envs.communicator_objects.command_pb2 import STEP, RESET
import pipeline
assert UnityEnvironment is pipeline.UnityEnvironment
assert ActionTuple is mlagents_envs.base_env.ActionTuple is pipeline.ActionTuple
assert issubclass(UnityEnvironment, BaseEnv)
assert (STEP, RESET) == (0, 1)
assert not hasattr(mlagents_envs.base_env, "Nothing")
try:
    from mlagents_envs.timers import timed
except ImportError as error:
    print(error)
try:
    import mlagents_envs.nothing
except ModuleNotFoundError as error:
    print(error)
"""


def test_modules_of_ml_agents_are_stood_in_for_when_asked():
    completed = run(SCRIPT)
    assert completed.returncode == 0, completed.stderr
    first, second = completed.stdout.splitlines()
    assert first.startswith("mlagents_envs.timers.timed has no equivalent: ")
    assert second == "No module named 'mlagents_envs.nothing'"


def test_an_installed_ml_agents_is_left_alone(tmp_path: Path):
    package = tmp_path / "mlagents_envs"
    package.mkdir()
    (package / "__init__.py").write_text("theirs = True\n")
    code = (
        "from pipeline import compat; compat.stand_in(); import mlagents_envs as one\n"
        "print(one.theirs); import mlagents_envs.base_env"
    )
    completed = run(code, tmp_path)
    assert completed.stdout == "True\n"
    assert "No module named 'mlagents_envs.base_env'" in completed.stderr


def test_importing_the_table_imports_nothing_else_of_ours():
    code = (
        "import sys; from pipeline import compat; "
        "print([m for m in sys.modules if m.startswith(('pipeline.', 'numpy', 'mlagents'))])"
    )
    assert run(code).stdout == "['pipeline.version', 'pipeline.compat']\n"


def test_the_commands_of_ml_agents_are_installed_by_a_package_of_their_own():
    project = tomllib.loads((ROOT / "packages/mlagents/pyproject.toml").read_text())["project"]
    ours = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert ours["optional-dependencies"]["mlagents"] == [project["name"]]
    assert project["version"] == pipeline.__version__
    refused = {
        "mlagents-learn": "error: --num-envs: must be at least 1, got 0\n",
        "mlagents-run-experiment": "error: --num-envs: must be at least 1, got 0\n",
        "mlagents-push-to-hf": "error: x: params.yaml has no such run; ",
        "mlagents-load-from-hf": f"error: {ROOT / 'src'}: is there already and not empty",
    }
    options = {
        "mlagents-push-to-hf": ["--local-dir", "x", "--repo-id", "a/b"],
        "mlagents-load-from-hf": ["--local-dir", str(ROOT), "--repo-id", "a/src"],
    }
    assert set(project["scripts"]) == set(refused)
    assert set(project["scripts"]).isdisjoint(ours["scripts"])
    for name, target in project["scripts"].items():
        module, function = target.split(":")
        code = f"import sys; from {module} import {function} as main; sys.exit(main())"
        words = options.get(name, ["--num-envs", "0", "--run-id", "x"])
        completed = run(code, arguments=words)
        assert completed.returncode == 2
        assert completed.stderr.startswith(refused[name])
        assert completed.stderr.count("\n") == 1


def test_the_commands_of_ml_agents_say_their_own_name_in_their_help():
    code = "import sys; sys.argv[0] = '/bin/mlagents-learn'; from pipeline.__main__ import *; "
    completed = run(code + "mlagents_learn()", arguments=["--help"])
    assert completed.stdout.startswith("usage: mlagents-learn [CONFIG] [options]")
