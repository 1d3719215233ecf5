import shutil
import socket
import subprocess
import sys
import types
from importlib import metadata
from pathlib import Path

import pytest

from pipeline.cli import doctor
from pipeline.cli import main as cli

PARAMS = """\
environments:
  game:
    source: {source}
    {key}: nowhere
experiments: {{}}
"""


@pytest.fixture
def told(here: Path, monkeypatch, capsys):
    """Run `pipeline doctor` in an empty folder without the torch check; return code and lines."""
    monkeypatch.delenv("PIPELINE_MLFLOW", raising=False)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setitem(doctor.CHECKS, "torch", lambda _: "2")
    monkeypatch.setitem(doctor.CHECKS, "ports", lambda _: "free")

    def run() -> tuple[int, dict[str, str]]:
        code = cli.main(["doctor"])
        out = capsys.readouterr().out.splitlines()
        return code, {line[6:].split()[0]: line[:6].strip() + line[16:] for line in out}

    return run


def test_doctor_reports_ok_for_every_check_in_an_empty_folder(told):
    code, lines = told()
    assert code == 0, lines
    assert list(lines) == list(doctor.CHECKS)
    assert all(line.startswith("OK ") for line in lines.values())


def test_doctor_shows_an_error_once_if_several_checks_find_the_same_error(told, tmp_path):
    (tmp_path / "params.yaml").write_text("x: 1\n")
    code, lines = told()
    assert code == 1
    assert [name for name, line in lines.items() if line.startswith("TO DO")] == ["project"]
    unchecked = [name for name, line in lines.items() if "fix project first" in line]
    assert unchecked == ["Unity", "builds"]


@pytest.mark.parametrize(
    ("line", "file", "text", "said"),
    [
        ("project", "params.yaml", "x: 1\n", "unknown key 'x'"),
        ("MLflow", "mlflow.db", "none" * 99, "file is not a database; repair it or move it away"),
        ("builds", "params.yaml", PARAMS.format(source="path", key="path"), "nowhere"),
        ("Unity", "params.yaml", PARAMS.format(source="unity", key="project"), "nowhere"),
        ("snakemake", ".snakemake/locks/a", "", "snakemake --unlock"),
        ("dvc", ".dvc/config", "", "git init"),
    ],
)
def test_doctor_prints_remedy_of_a_failed_check(line, file, text, said, told, tmp_path: Path):
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(text)
    code, lines = told()
    assert code == 1
    assert lines[line].startswith("TO DO")
    assert said in lines[line]


def test_doctor_reports_old_python_full_disk_and_missing_package(told, monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 9, 1))
    usage = shutil.disk_usage(".")._replace(free=10**9)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    monkeypatch.setattr(doctor, "_version", lambda _: doctor._python(Path()))
    code, lines = told()
    assert code == 1
    assert "3.9.1: Python 3.11 to 3.13 is needed" in lines["Python"]
    assert "1.0 GB free, and runs need 2 GB" in lines["disk"]
    assert lines["packages"].startswith("TO DO")


@pytest.mark.parametrize(
    ("versions", "loaded", "is_mixed"),
    [
        ({"mujoco-core": "4.0.1"}, "4.0.1", False),
        ({"mujoco": "4.0.0", "mujoco-core": "4.0.1", "mujoco-studio": "4.0.0"}, "4.0.1", False),
        ({"mujoco": "3.17.0", "mujoco-core": "4.0.1"}, "4.0.1", True),
        ({"mujoco-core": "4.0.1", "mujoco-mjx": "3.9.0"}, "4.0.1", True),
        # the files of one version over the list of another
        ({"mujoco-core": "4.0.1"}, "3.17.0", True),
        # pip has removed the old version after it had written the new one
        ({"mujoco": "4.0.1", "mujoco-core": "4.0.1"}, None, True),
    ],
)
def test_doctor_reports_mixed_mujoco_versions(versions, loaded, is_mixed, told, monkeypatch):
    """MuJoCo 4 came in parts, which an upgrade by pip leaves incomplete."""

    def version(name: str) -> str:
        if name.startswith("mujoco") and name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions.get(name, "1.0")

    library = types.SimpleNamespace(mj_versionString=lambda: loaded)
    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setitem(sys.modules, "mujoco", library if loaded else None)
    _, lines = told()
    if not is_mixed:
        assert lines["packages"].startswith("OK")
        return
    assert lines["packages"].startswith("TO DO")
    for text in (*versions, *versions.values(), "installed over each other"):
        assert text in lines["packages"]
    assert f"pip uninstall -y {' '.join(versions)}; pip install" in lines["packages"]


def test_doctor_reports_an_unreachable_mlflow_server(told, monkeypatch):
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))  # and does not listen
        port = sock.getsockname()[1]
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
        code, lines = told()
    assert code == 1
    assert f"127.0.0.1:{port} cannot be reached" in lines["MLflow"]


def test_doctor_reports_an_occupied_editor_port(monkeypatch):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        monkeypatch.setattr(doctor, "_EDITOR_PORT", listener.getsockname()[1])
        with pytest.raises(doctor.Problem, match="the other trainer"):
            doctor._ports(Path())


def test_completion_script_completes_commands_options_and_files(printed, tmp_path):
    script = tmp_path / "pipeline.sh"
    script.write_text(printed("completion", "bash"))
    (tmp_path / "some.onnx").touch()

    def completed(*words: str) -> list[str]:
        line = f"source {script}; COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; "
        line += '_shtab_pipeline; echo "${COMPREPLY[@]}"'
        bash = shutil.which("bash") or pytest.skip("no bash here")
        output = subprocess.check_output([bash, "-c", line], text=True, cwd=tmp_path)  # noqa: S603
        return output.split()

    assert completed("pipeline", "eval") == ["evaluate"]
    assert completed("pipeline", "learn", "--num") == ["--num-runs", "--num-envs", "--num-areas"]
    assert "some.onnx" in completed("pipeline", "evaluate", "some")


def test_completion_refuses_an_unknown_shell(refused):
    assert "invalid choice: 'csh'" in refused("completion", "csh")


def test_doctor_names_packages_whose_versions_differ_from_the_lock_files(tmp_path, monkeypatch):
    assert doctor._locks(Path(__file__).parents[3]) == doctor._locks(tmp_path), "those of the code"
    (tmp_path / "locks").mkdir()
    version = metadata.version("numpy")
    (tmp_path / "locks/a.txt").write_text(f"numpy=={version}\n")
    assert doctor._locks(tmp_path) == "all packages have the locked versions"
    (tmp_path / "locks/a.txt").write_text("numpy==1.0\n")
    assert doctor._locks(tmp_path) == f"not the locked versions: numpy {version} (locked 1.0)"
    monkeypatch.setattr(doctor, "checkout", lambda: tmp_path / "absent")
    assert doctor._locks(tmp_path / "absent") == (
        "no lock files here; `make lock` in a clone of rl-pipeline writes them"
    )
