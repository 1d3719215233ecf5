"""Looking before blocking: it stops when it does not pay, and begins again when it does."""

from __future__ import annotations

import os
import time
from itertools import pairwise

import pytest

from pipeline.errors import SettingsError
from pipeline.protocol import spin_wait
from pipeline.protocol.spin_wait import VARIABLE, SpinWait


class Other:
    """A selector of what the other end sends: counts how often it is asked."""

    def __init__(self) -> None:
        self.asked = 0
        self.there = False

    def select(self, timeout: float) -> bool:
        assert timeout == 0
        self.asked += 1
        return self.there


class SlowOther(Other):
    """It answers the second look; between looks somebody else has the processor."""

    def select(self, timeout: float) -> bool:
        was_there = super().select(timeout)
        time.sleep(2e-3)
        self.there = True
        return was_there


def test_what_is_there_is_seen_at_the_first_look():
    wait, other = SpinWait(1.0), Other()
    other.there = True
    wait.poll(other)
    assert other.asked == 1


def test_looking_in_vain_is_left_out_more_and_more():
    wait, other = SpinWait(1e-4), Other()
    looked = []
    for _ in range(40):
        before = other.asked
        wait.poll(other)
        looked.append(other.asked > before)
    # looks, leaves out 1, looks, leaves out 2, looks, leaves out 4, ...
    assert [i for i, did in enumerate(looked) if did] == [0, 2, 5, 10, 19, 36]


def test_however_long_it_was_in_vain_it_looks_again_after_1024_waits():
    wait, other = SpinWait(1e-5), Other()
    looks = []
    for number in range(5000):
        before = other.asked
        wait.poll(other)
        if other.asked > before:
            looks.append(number)
    assert max(b - a for a, b in pairwise(looks)) == 1025


def test_success_brings_the_habit_back():
    wait, other = SpinWait(1e-4), Other()
    for _ in range(6):  # in vain at 0, 2 and 5; then 4 are left out
        wait.poll(other)
    other.there = True
    before = other.asked
    for _ in range(10):
        wait.poll(other)
    assert other.asked - before == 6


def test_an_answer_does_not_pay_where_others_had_the_processor_meanwhile():
    wait, other = SpinWait(1.0), SlowOther()
    looked = []
    for _ in range(11):
        other.asked, other.there = 0, False
        wait.poll(other)
        looked.append(other.asked > 0)
    assert [i for i, did in enumerate(looked) if did] == [0, 2, 5, 10]
    assert other.there  # it was seen nevertheless


def test_who_polls_gives_way_at_each_look_but_not_once_the_answer_is_there(monkeypatch):
    wait, other, given_way = SpinWait(1.0), Other(), []

    def give_way():
        given_way.append(other.asked)
        other.there = other.asked == 3

    monkeypatch.setattr(spin_wait, "_let_others_work", give_way)
    wait.poll(other)
    assert given_way == [1, 2, 3]
    assert other.asked == 4


@pytest.mark.parametrize("is_posix", [True, False])
def test_to_give_way_takes_no_time_where_nobody_waits(monkeypatch, is_posix):
    if not is_posix:  # as on Windows
        monkeypatch.delattr(os, "sched_yield")
    began = time.perf_counter()
    for _ in range(100):
        spin_wait._let_others_work()
    assert time.perf_counter() - began < 1.0


def test_variable_sets_the_limit_and_nonsense_is_refused(monkeypatch):
    monkeypatch.setenv(VARIABLE, "0")
    other = Other()
    SpinWait().poll(other)
    assert other.asked == 0
    monkeypatch.setenv(VARIABLE, "soon")
    with pytest.raises(SettingsError, match="PIPELINE_SPIN_US=soon: expected microseconds"):
        SpinWait()


@pytest.mark.parametrize(("given", "limit_s"), [("500", 5e-4), ("0", 0.0), ("-20", 0.0)])
def test_the_variable_is_in_microseconds(monkeypatch, given, limit_s):
    monkeypatch.setenv(VARIABLE, given)
    assert SpinWait().limit_s == pytest.approx(limit_s)


@pytest.mark.parametrize(("n", "looks"), [(1, False), (2, True)])
def test_by_itself_it_looks_for_a_moment_where_another_processor_can_work(monkeypatch, n, looks):
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(spin_wait, "_n_processors", lambda: n)
    assert (1e-4 < SpinWait().limit_s < 1e-2) if looks else SpinWait().limit_s == 0.0
