"""How many seeds the learning tests take: `pytest tests/learning --learning-seeds 3`.

Without the option, and so in `make test`, each takes one. `make test-learning` takes three.
"""

from __future__ import annotations

import pytest
import torch


def pytest_addoption(parser):
    parser.addoption(
        "--learning-seeds",
        type=int,
        default=1,
        metavar="N",
        help="train every toy with the seeds 1 to N (1; `make test-learning` takes 3)",
    )


def pytest_generate_tests(metafunc):
    if "seed" in metafunc.fixturenames:
        # without this folder on the command line pytest has not asked for the option
        n = metafunc.config.getoption("--learning-seeds", default=1)
        metafunc.parametrize("seed", range(1, n + 1))


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
