"""Looking before blocking: it stops when it does not pay, and begins again when it does."""

from __future__ import annotations

import pytest

from pipeline.errors import SettingsError
from pipeline.protocol.patience import VARIABLE, Patience


class Other:
    """The other end: counts how often it is asked."""

    def __init__(self) -> None:
        self.asked = 0
        self.there = False

    def __call__(self) -> bool:
        self.asked += 1
        return self.there


def test_what_is_there_is_seen_at_the_first_look():
    patience, other = Patience(1.0), Other()
    other.there = True
    patience.look(other)
    assert other.asked == 1


def test_looking_in_vain_is_left_out_more_and_more():
    patience, other = Patience(1e-4), Other()
    looked = []
    for _ in range(40):
        before = other.asked
        patience.look(other)
        looked.append(other.asked > before)
    # looks, leaves out 1, looks, leaves out 2, looks, leaves out 4, ...
    assert [i for i, did in enumerate(looked) if did] == [0, 2, 5, 10, 19, 36]


def test_success_brings_the_habit_back():
    patience, other = Patience(1e-4), Other()
    for _ in range(6):  # in vain at 0, 2 and 5; then 4 are left out
        patience.look(other)
    other.there = True
    before = other.asked
    for _ in range(10):
        patience.look(other)
    assert other.asked - before == 6


def test_variable_sets_the_limit_and_nonsense_is_refused(monkeypatch):
    monkeypatch.setenv(VARIABLE, "0")
    other = Other()
    Patience().look(other)
    assert other.asked == 0
    monkeypatch.setenv(VARIABLE, "soon")
    with pytest.raises(SettingsError, match="PIPELINE_SPIN_US=soon: expected microseconds"):
        Patience()
