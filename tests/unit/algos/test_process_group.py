"""`ProcessGroup` of a single process, and the variables of launchers."""

import numpy as np
import pytest
import torch

from pipeline.algos.process_group import SINGLE_PROCESS, launched
from pipeline.errors import SettingsError

GIVEN = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "here", "MASTER_PORT": "29500"}


def test_rank_and_size_are_read_from_the_variables_of_a_launcher(monkeypatch):
    for name, value in GIVEN.items():
        monkeypatch.setenv(name, value)
    assert launched() == (1, 3)
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(SettingsError, match=r"RANK and WORLD_SIZE must be whole numbers .*first"):
        launched()


@pytest.mark.parametrize("missing", GIVEN)
def test_a_process_without_a_launcher_has_rank_0_in_a_group_of_1(missing, monkeypatch):
    for name, value in GIVEN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(missing)
    assert launched() == (0, 1)


def test_a_group_of_one_process_uses_only_the_numbers_of_this_process():
    assert (SINGLE_PROCESS.rank, SINGLE_PROCESS.size) == (0, 1)
    assert SINGLE_PROCESS.minibatch_sizes(10, 4) == [4, 4]
    assert SINGLE_PROCESS.minibatch_sizes(3, 4) == [3]
    assert (SINGLE_PROCESS.least(7), SINGLE_PROCESS.most(7)) == (7, 7)
    assert len(list(SINGLE_PROCESS.weighted([4, 4, 2]))) == 3
    values = np.array([[1.0], [2.0], [6.0]], np.float32)
    mean, deviation = SINGLE_PROCESS.moments(values)
    assert (mean, deviation) == pytest.approx((3.0, np.sqrt(14 / 3)))
    assert SINGLE_PROCESS.std(torch.from_numpy(values)).tolist() == pytest.approx([np.sqrt(14 / 3)])
    means = torch.tensor([1.0, 2.0])
    SINGLE_PROCESS.average_(means, 5)
    assert means.tolist() == [1.0, 2.0]
