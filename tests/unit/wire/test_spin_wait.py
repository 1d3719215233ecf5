"""Polling before a wait blocks: it pauses while it does not pay, and resumes when it pays."""

import os
from itertools import pairwise

import pytest

from pipeline.errors import SettingsError
from pipeline.wire.transport import spin_wait
from pipeline.wire.transport.spin_wait import VARIABLE, SpinWait


class Other:
    """A selector that counts its calls, and is ready if `there` is set."""

    def __init__(self) -> None:
        self.asked = 0
        self.there = False

    def select(self, timeout: float) -> bool:
        assert timeout == 0
        self.asked += 1
        return self.there


class LateOther(Other):
    """A selector that is ready at every third call; each call takes a millisecond of `clock`."""

    def __init__(self, clock) -> None:
        super().__init__()
        self.clock, self.answers = clock, True

    def select(self, timeout: float) -> bool:
        super().select(timeout)
        self.clock.now += 1e-3
        return self.answers and self.asked % 3 == 0


class Clock:
    """A replacement of `time`; other processes have the share `others` of the processor."""

    def __init__(self) -> None:
        self.now, self.others = 0.0, 0.0

    def perf_counter(self) -> float:
        return self.now

    def thread_time(self) -> float:
        return (1.0 - self.others) * self.now


@pytest.fixture
def clock(monkeypatch):
    stopped = Clock()
    monkeypatch.setattr(spin_wait, "time", stopped)
    return stopped


def looks(wait: SpinWait, other: Other, n: int) -> list[int]:
    """Wait `n` times, and return the indices of the waits that polled."""
    looked = []
    for number in range(n):
        before = other.asked
        wait.poll(other)
        if other.asked > before:
            looked.append(number)
    return looked


def test_after_unsuccessful_polling_at_most_1024_of_the_next_waits_do_not_poll():
    wait, other = SpinWait(1e-5), Other()
    looked = looks(wait, other, 5000)
    # It polls, skips 1 wait, polls, skips 2 waits, polls, skips 4 waits, and so on.
    assert looked[:6] == [0, 2, 5, 10, 19, 36]
    assert max(b - a for a, b in pairwise(looked)) == 1025
    other = Other()
    other.there = True
    SpinWait(1.0).poll(other)
    assert other.asked == 1, "what is there is seen at the first look"


def test_after_successful_polling_every_wait_polls_again(clock):
    wait, other = SpinWait(9.5e-3), LateOther(clock)
    other.answers = False
    for _ in range(6):  # without success at 0, 2 and 5; then 4 waits are skipped
        wait.poll(other)
    assert other.asked == 3 * 10
    other.answers = True
    for _ in range(10):
        wait.poll(other)
    assert other.asked == 3 * 10 + 3 * 6
    other.answers = False
    for _ in range(3):  # without success at 0 and 2, as at the beginning
        wait.poll(other)
    assert other.asked == 3 * 10 + 3 * 6 + 2 * 10


@pytest.mark.parametrize(("others", "pays"), [(0.0, True), (0.2, True), (0.3, False), (1.0, False)])
def test_next_wait_does_not_poll_if_other_processes_had_the_processor_for_too_long(
    clock, others, pays
):
    clock.others = others
    wait, other = SpinWait(1.0), LateOther(clock)
    looked = looks(wait, other, 11)
    assert looked == (list(range(11)) if pays else [0, 2, 5, 10])
    assert other.asked == 3 * len(looked)  # every poll ended with the answer


def test_polling_yields_the_processor_at_each_poll_until_the_answer_arrives(monkeypatch):
    wait, other, given_way = SpinWait(1.0), Other(), []

    def give_way():
        given_way.append(other.asked)
        other.there = other.asked == 3

    monkeypatch.setattr(spin_wait, "_yield_processor", give_way)
    wait.poll(other)
    assert given_way == [1, 2, 3]
    assert other.asked == 4


def test_polling_sleeps_for_0_seconds_on_a_system_without_sched_yield(monkeypatch):
    wait, other, slept = SpinWait(1.0), Other(), []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        other.there = True

    monkeypatch.delattr(os, "sched_yield", raising=False)  # Windows
    monkeypatch.setattr(spin_wait.time, "sleep", sleep)
    wait.poll(other)
    assert (slept, other.asked) == ([0], 2)


@pytest.mark.parametrize("given", ["soon", "", "nan", "inf", "1000001"])
def test_polling_times_that_are_invalid_or_too_long_are_refused(monkeypatch, given):
    monkeypatch.setenv(VARIABLE, given)
    expected = f"PIPELINE_SPIN_US={given}: expected microseconds .* at most 1000000, such as 500"
    with pytest.raises(SettingsError, match=expected):
        SpinWait()


@pytest.mark.parametrize(
    ("given", "limit_s"), [("500", 5e-4), ("1000000", 1.0), ("0", 0.0), ("-20", 0.0)]
)
def test_environment_variable_sets_the_polling_time_in_microseconds_and_0_turns_polling_off(
    monkeypatch, given, limit_s
):
    monkeypatch.setenv(VARIABLE, given)
    wait, other = SpinWait(), Other()
    assert wait.limit_s == pytest.approx(limit_s)
    if limit_s == 0.0:
        wait.poll(other)
        assert other.asked == 0


@pytest.mark.parametrize(("n", "looks"), [(1, False), (2, True)])
def test_polling_is_on_by_default_only_with_several_processors(monkeypatch, n, looks):
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(spin_wait, "_n_processors", lambda: n)
    assert (1e-4 < SpinWait().limit_s < 1e-2) if looks else SpinWait().limit_s == 0.0
