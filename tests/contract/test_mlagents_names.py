"""Each name of ML-Agents has an equivalent or a reason, and code that uses the names runs."""

import os
import re
import subprocess
import tomllib
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import pytest
from interpreter import python
from packaging.specifiers import SpecifierSet
from packaging.version import Version

import pipeline
from pipeline.wire.codec.generated.messages import AgentInfoProto, UnityRLOutputProto

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/reference/ml-agents-names.md"
PACKAGE = ROOT / "packages/mlagents_envs"


def run(code: str, *path: Path, arguments: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    return python("-c", code, *arguments, first=path, check=False)


ROWS = {
    name: (ours, note)
    for name, ours, note in re.findall(
        r"^\| `(mlagents\S+)` \| (?:`(\S+)`)? \| (.*) \|$", PAGE.read_text(), re.MULTILINE
    )
}


def test_each_name_on_the_migration_page_can_be_imported_or_its_import_error_gives_the_reason():
    code = f"""
from importlib import import_module
def at(place):
    module, _, name = place.rpartition(".")
    return getattr(import_module(module), name)
for name, (ours, note) in {ROWS!r}.items():
    try:
        assert at(name) is at(ours), name
    except ImportError as error:
        assert not ours, name
        assert note in str(error), (name, str(error))
        assert "docs/how-to/migrating.md" in str(error), name
"""
    assert len(ROWS) > 180
    assert min(len(note) for ours, note in ROWS.values() if not ours) > 10
    completed = run(code, PACKAGE)
    assert completed.returncode == 0, completed.stderr


def test_documented_replacement_of_steps_from_proto_decodes_agent_messages():
    reason = ROWS["mlagents_envs.rpc_utils.steps_from_proto"][1]
    module, call = re.search(r"`(pipeline\S+)\.(Decoder)\(spec, name\)\.decode`", reason).groups()
    actions = pipeline.ActionSpec.create_continuous(1)
    agents = [AgentInfoProto(id=4, reward=2.0)]
    data = UnityRLOutputProto.ListAgentInfoProto(value=agents).SerializeToString()
    spec = pipeline.BehaviorSpec([], actions)
    steps, ended = getattr(import_module(module), call)(spec, "Walker").decode(data)
    assert (steps.agent_id.tolist(), steps.reward.tolist(), len(ended)) == ([4], [2.0], 0)


LISTED = Path(os.environ.get("MLAGENTS_LEARN", ROOT / ".venv-mlagents/bin/mlagents-learn"))


@pytest.mark.skipif(not LISTED.exists(), reason="`make peer` installs mlagents_envs 1.1.0")
def test_migration_page_has_every_public_name_of_the_installed_mlagents_envs():
    completed = python(ROOT / "benchmarks/peer_names.py", check=False)
    assert completed.returncode == 0, completed.stdout + completed.stderr


SCRIPT = """
import mlagents_envs
from mlagents_envs.base_env import *
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
assert ObservationSpec is pipeline.ObservationSpec
assert "DecisionSteps" in dir(mlagents_envs.base_env)
assert mlagents_envs.__version__ == "1.1.0"
assert issubclass(UnityEnvironment, BaseEnv)
assert (STEP, RESET) == (0, 1)
assert not hasattr(mlagents_envs.base_env, "Nothing")
"""


def test_mlagents_script_runs_unchanged_with_our_mlagents_envs_package():
    completed = run(SCRIPT, PACKAGE)
    assert completed.returncode == 0, completed.stderr
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    assert project["name"] == "mlagents-envs"
    assert Version(project["version"]) in SpecifierSet("==1.1.0")


def test_mlagents_commands_are_installed_by_a_separate_package():
    project = tomllib.loads((ROOT / "packages/mlagents/pyproject.toml").read_text())["project"]
    ours = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert ours["optional-dependencies"]["mlagents"] == [project["name"]]
    assert project["version"] == pipeline.__version__
    refused = {
        "mlagents-learn": "error: --num-envs: must be at least 1, got 0\n",
        "mlagents-run-experiment": "error: --num-envs: must be at least 1, got 0\n",
        "mlagents-push-to-hf": "error: x: params.yaml has no such run; ",
        "mlagents-load-from-hf": f"error: {ROOT / 'src'}: exists and is not empty",
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
    code = "import sys; sys.argv[0] = '/bin/mlagents-learn'; from pipeline.__main__ import *; "
    completed = run(code + "mlagents_learn()", arguments=["--help"])
    assert completed.stdout.startswith("usage: mlagents-learn [CONFIG] [options]")
