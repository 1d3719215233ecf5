"""How many seeds the learning tests take: `pytest tests/learning --learning-seeds 3`.

Without the option, and so in `make test`, each takes one, and those that are marked `in_full` are
left out. `make test-learning` takes three, and writes what each learned as a table.
"""

from __future__ import annotations

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
        # without this folder on the command line pytest has not asked for the option
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
    """Keeps what one seed reached, for the table at the end."""

    def keep(what: str, found: float, *, wanted: float, steps: int) -> None:
        # a property of the test, because the table may be made in another process than the test
        request.node.user_properties.append((_LEARNED, (what, steps, wanted, float(found))))

    return keep


def pytest_terminal_summary(terminalreporter, config):
    rows: dict[tuple, list[float]] = {}
    reports = [one for kind in ("passed", "failed") for one in terminalreporter.getreports(kind)]
    for report in sorted(reports, key=lambda one: one.nodeid):
        for name, value in getattr(report, "user_properties", ()):
            if name == _LEARNED and report.when == "call":
                *row, found = value
                rows.setdefault(tuple(row), []).append(found)
    if not rows:
        return
    lines = ["| What | Agent steps | Wanted | Reached, by seed |", "| --- | ---: | ---: | --- |"]
    for (what, steps, wanted), found in rows.items():
        reached = " / ".join(f"{one:.2f}" for one in found)
        lines.append(f"| {what} | {steps:,} | {wanted:g} | {reached} |")
    terminalreporter.section("what was learned")
    terminalreporter.write_line("\n".join(lines))
    file = config.getoption("--learning-table", default=None)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
