"""Polling before a wait blocks: it pauses while it does not pay, and resumes when it pays."""

import os
from itertools import pairwise

import pytest

from pipeline.errors import SettingsError
from pipeline.wire.transport import spin_wait
from pipeline.wire.transport.spin_wait import VARIABLE, SpinWait


class Other:
    """A selector that is ready at the calls for which `is_ready` is True; each takes 1 ms."""

    def __init__(self, is_ready, clock=None) -> None:
        self.is_ready, self.clock, self.asked = is_ready, clock or Clock(), 0

    def select(self, timeout: float) -> bool:
        assert timeout == 0
        self.asked += 1
        self.clock.now += 1e-3
        return self.is_ready(self.asked)


def never(_: int) -> bool:
    return False


def at_third(number: int) -> bool:
    return number % 3 == 0


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
    wait, other = SpinWait(1e-5), Other(never)
    looked = looks(wait, other, 5000)
    # It polls, skips 1 wait, polls, skips 2 waits, polls, skips 4 waits, and so on.
    assert looked[:6] == [0, 2, 5, 10, 19, 36]
    assert max(b - a for a, b in pairwise(looked)) == 1025
    other = Other(lambda _: True)
    SpinWait(1.0).poll(other)
    assert other.asked == 1, "what is there is seen at the first look"


def test_after_successful_polling_every_wait_polls_again(clock):
    wait, other = SpinWait(9.5e-3), Other(never, clock)
    for _ in range(6):  # without success at 0, 2 and 5; then 4 waits are skipped
        wait.poll(other)
    assert other.asked == 3 * 10
    other.is_ready = at_third
    for _ in range(10):
        wait.poll(other)
    assert other.asked == 3 * 10 + 3 * 6
    other.is_ready = never
    for _ in range(3):  # without success at 0 and 2, as at the beginning
        wait.poll(other)
    assert other.asked == 3 * 10 + 3 * 6 + 2 * 10


@pytest.mark.parametrize(("others", "pays"), [(0.0, True), (0.2, True), (0.3, False), (1.0, False)])
def test_next_wait_does_not_poll_if_other_processes_had_the_processor_for_too_long(
    clock, others, pays
):
    clock.others = others
    wait, other = SpinWait(1.0), Other(at_third, clock)
    looked = looks(wait, other, 11)
    assert looked == (list(range(11)) if pays else [0, 2, 5, 10])
    assert other.asked == 3 * len(looked)  # every poll ended with the answer


@pytest.mark.parametrize("has_yield", [True, False])  # Windows has no `sched_yield`
def test_polling_yields_the_processor_at_each_poll_until_the_answer_arrives(monkeypatch, has_yield):
    yielded, other = [], Other(lambda number: number == 4)
    if has_yield:
        monkeypatch.setattr(os, "sched_yield", lambda: yielded.append(0), raising=False)
    else:
        monkeypatch.delattr(os, "sched_yield", raising=False)
        monkeypatch.setattr(spin_wait.time, "sleep", yielded.append)
    SpinWait(1.0).poll(other)
    assert (yielded, other.asked) == ([0, 0, 0], 4)


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
    wait, other = SpinWait(), Other(never)
    assert wait.limit_s == pytest.approx(limit_s)
    if limit_s == 0.0:
        wait.poll(other)
        assert other.asked == 0


@pytest.mark.parametrize(("n", "looks"), [(1, False), (2, True)])
def test_polling_is_on_by_default_only_with_several_processors(monkeypatch, n, looks):
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(spin_wait, "_n_processors", lambda: n)
    assert (1e-4 < SpinWait().limit_s < 1e-2) if looks else SpinWait().limit_s == 0.0
