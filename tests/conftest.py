"""Fixtures and settings of all tests."""

import functools
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import psutil
import pytest
from loopback import Site, site
from only_our_parts import hide_plugins

# Tests import grpc before the pipeline can set this; see pipeline.wire.transport.grpc_server.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

# Without time limits per example: on a busy machine they would fail tests by chance.
hypothesis.settings.register_profile(
    "tests", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("tests")

REPOSITORY = Path(__file__).parents[1]

MEMORY = Path("/dev/shm")  # noqa: S108  # pytest makes its own folder in it
ROOM_BYTES = 4 << 30


def may_test_in_memory() -> bool:
    """Return whether memory has room for the tests' files, and allows to execute them."""
    if "TMPDIR" in os.environ or not os.access(MEMORY, os.W_OK):
        return False
    system = os.statvfs(MEMORY)
    free = min(system.f_bavail * system.f_frsize, psutil.virtual_memory().available)
    return free > ROOM_BYTES and not system.f_flag & os.ST_NOEXEC


# Tests flush files thousands of times, and a disk needs milliseconds for each flush. The tests end
# processes but not the machine, and a killed process loses no written bytes.
if may_test_in_memory():
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))


def pytest_configure(config: pytest.Config) -> None:
    """Hide installed plug-ins from the tests."""
    folder = tempfile.TemporaryDirectory(prefix="no-plug-ins-")
    config.add_cleanup(folder.cleanup)
    hide_plugins(Path(folder.name))


@pytest.fixture(scope="session")
def fixtures() -> Path:
    """The folder of files that were written by Unity and ML-Agents."""
    named = os.environ.get("PIPELINE_FIXTURES")
    folder = Path(named) if named else REPOSITORY.parent / "shared" / "fixtures"
    if not folder.is_dir():
        pytest.skip("files of Unity and ML-Agents: PIPELINE_FIXTURES names no folder of them")
    return folder


@pytest.fixture
def web() -> Iterator[Site]:
    """A web server on this machine, without files."""
    with site() as served:
        yield served


@pytest.fixture
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder for one test."""
    monkeypatch.setenv("PIPELINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function like `pack` that packs each executable only once, because it takes seconds."""
    folder = tmp_path_factory.mktemp("packed")

    @functools.cache
    def built(name: str, **options: object) -> Path:
        from pipeline.simulators.pack import pack

        return pack(name, folder / "-".join(map(str, (name, *options.values()))), **options)

    def write(name: str, target: Path, **options: object) -> Path:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.hardlink_to(built(name, **options))
        return target

    return write


@pytest.fixture(scope="session")
def mlflow_tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MLflow store without runs: creating its tables takes longer than most tests."""
    from mlflow_runs import client

    path = tmp_path_factory.mktemp("store") / "mlflow.db"
    client(path.parent).search_experiments()
    return path


MARKS = dict.fromkeys(("determinism", "field", "fuzz", "learning"), "slow") | {
    "benchmarks": "tools"
}
"""Marker of all tests in a folder of `tests`; see pyproject.toml."""


@pytest.hookimpl(tryfirst=True)  # before pytest selects tests by their markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by their folder, and run files with many slow tests and with engines first.

    So no worker process begins a slow file at the end, while all other processes are idle.
    """
    n_slow: dict[Path, int] = {}
    for item in items:
        if mark := MARKS.get(item.path.relative_to(REPOSITORY).parts[1]):
            item.add_marker(mark)
        n_slow[item.path] = n_slow.get(item.path, 0) + (item.get_closest_marker("slow") is not None)
    items.sort(key=lambda item: (-n_slow[item.path], item.path.parent.name != "workflow"))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, which is the working folder of the test."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _ended(capsys: pytest.CaptureFixture[str], words: tuple[object, ...]) -> tuple[int, str, str]:
    """Run a `pipeline` command in this process; return exit code, output and errors."""
    from pipeline.cli import main as cli

    capsys.readouterr()
    try:
        code = cli.main([*map(str, words)])
    except SystemExit as ended:  # argparse ends the process after a mistake
        code = ended.code
    return code, *capsys.readouterr()


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command that must succeed; return what it prints."""

    def run(*words: object) -> str:
        code, out, error = _ended(capsys, words)
        assert code == 0, error
        return out

    return run


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command that must fail; return the only line that it prints, without `error: `."""

    def run(*words: object) -> str:
        code, out, error = _ended(capsys, words)
        assert (code, out, error[:7], error.count("\n")) == (2, "", "error: ", 1), error
        return error[7:-1]

    return run
