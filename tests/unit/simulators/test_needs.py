import json
import sys
from pathlib import Path

import gymnasium
import numpy as np
import pytest

from pipeline.errors import SettingsError, StageError
from pipeline.simulators import pack


def test_requirements_of_a_packed_environment_leave_out_the_standard_library_and_pipeline():
    core = sys.modules["gymnasium.core"].__file__
    needed = pack.needs_from({"gymnasium.core": core, "numpy": np.__file__})
    assert needed.distributions == ("gymnasium", "numpy")
    assert needed.files["gymnasium/core.py"] == Path(core)
    assert gymnasium.__file__ not in map(str, needed.files.values())
    ours = {name: sys.modules[name].__file__ for name in ("pipeline", "pipeline.errors")}
    standard = {"json": json.__file__, "json.decoder": json.decoder.__file__, "sys": ""}
    standard["os.path"] = "/usr/lib/python3/posixpath.py"
    assert pack.needs_from(ours | standard) == pack.Needs(distributions=(), files={})


def test_package_that_was_not_installed_by_pip_is_packed_with_all_its_files(tmp_path):
    names = ("a/__init__.py", "a/b/c.py", "a/data/x.txt", "a/.git/y", "a/__pycache__/z.pyc", "s.py")
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    needed = pack.needs_from({"a.b.c": str(tmp_path / "a/b/c.py"), "s": str(tmp_path / "s.py")})
    assert needed.distributions == ()
    assert set(needed.files) == {"a/__init__.py", "a/b/c.py", "a/data/x.txt", "s.py"}


def test_packed_executable_that_does_not_run_with_its_own_files_only_is_refused(tmp_path):
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\necho 'No module named x' >&2\nexit 1\n")
    program.chmod(0o755)
    with pytest.raises(
        StageError, match=r"toy-v0: .* does not run with its own files only \(No module named x\)"
    ):
        pack.verify(program, "toy-v0")


def test_simulator_whose_observations_differ_from_its_specification_is_refused(
    tmp_path, monkeypatch
):
    (tmp_path / "narrow.py").write_text(
        "import numpy as np\n"
        "from pipeline.simulators.games.sorter import Sorter\n"
        "class Narrow(Sorter):\n"
        "    def reset(self):\n"
        "        return self._cut(super().reset())\n"
        "    def step(self, actions):\n"
        "        return self._cut(super().step(actions))\n"
        "    def _cut(self, steps):\n"
        "        for each in (one for pair in steps.values() for one in pair):\n"
        "            each.obs[-1] = each.obs[-1][..., :-1]\n"
        "        return steps\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SettingsError, match=r"narrow:Narrow: an agent of .* observes the shapes"):
        pack.needs_of("module", {"id": "narrow:Narrow"})
