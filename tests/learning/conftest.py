"""Number of seeds of the learning tests: `pytest tests/learning --learning-seeds 3`.

Without the option, as in `make test-all`, each test runs with one seed, and tests with the mark
`in_full` are left out. `make test-learning` uses three seeds and writes a table of the results.
"""

from pathlib import Path

import pytest
import torch

_LEARNED = "learned"


def pytest_addoption(parser):
    parser.addoption(
        "--learning-seeds",
        type=int,
        default=1,
        metavar="N",
        help="train every toy with the seeds 1 to N (1; `make test-learning` takes 3)",
    )
    parser.addoption(
        "--learning-table",
        type=Path,
        default=None,
        metavar="FILE",
        help="write what was wanted and what each seed reached, as a Markdown table",
    )


def pytest_generate_tests(metafunc):
    if "seed" in metafunc.fixturenames:
        # pytest reads this option only if this folder is on the command line.
        n = metafunc.config.getoption("--learning-seeds", default=1)
        metafunc.parametrize("seed", range(1, n + 1))


def pytest_collection_modifyitems(config, items):
    if config.getoption("--learning-seeds", default=1) == 1:
        left_out = [item for item in items if item.get_closest_marker("in_full")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def note(request):
    """Return a function that records the result of one seed for the table at the end."""

    def keep(title: str, reached: float, *, threshold: float, steps: int) -> None:
        # The result becomes a property of the test, because another process may write the table.
        request.node.user_properties.append((_LEARNED, (title, steps, threshold, float(reached))))

    return keep


def pytest_terminal_summary(terminalreporter, config):
    rows: dict[tuple, list[float]] = {}
    reports = [*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")]
    for report in sorted(reports, key=lambda test_report: test_report.nodeid):
        for name, value in getattr(report, "user_properties", ()):
            if name == _LEARNED and report.when == "call":
                *row, result = value
                rows.setdefault(tuple(row), []).append(result)
    if not rows:
        return
    lines = ["| What | Agent steps | Wanted | Reached, by seed |", "| --- | ---: | ---: | --- |"]
    for (title, steps, threshold), results in rows.items():
        reached = " / ".join(f"{number:.2f}" for number in results)
        lines.append(f"| {title} | {steps:,} | {threshold:g} | {reached} |")
    terminalreporter.section("what was learned")
    terminalreporter.write_line("\n".join(lines))
    file = config.getoption("--learning-table", default=None)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
