"""The number that `steps_per_update: auto` becomes."""

import pytest

from pipeline.settings.pace import LEAST, MOST, chosen_pace, free_share

# Milliseconds of waiting and of an update, rows, environments, cores, and the expected number.
PROFILES = {
    "one agent, slow environment": (14, 6, 1, 1, 2, 0.5),
    "an update just fits": (14, 12, 1, 1, 2, 1.0),
    "an update does not fit": (6, 10.8, 1, 1, 2, 2.0),
    "never more than four updates a step": (30, 1, 1, 1, 2, LEAST),
    "12 agents at 6 ms": (6, 10.8, 12, 1, 2, 24.0),
    "an instantaneous environment": (0.0, 10, 12, 1, 2, MOST),
    "nearly so": (0.05, 10, 1, 1, 2, MOST),
    "rows of four steps at once": (14, 12, 4, 1, 2, 4.0),
    "four environments, enough cores": (14, 6, 4, 4, 8, 2.0),
    "four environments, two cores": (14, 6, 4, 4, 2, 4 / (0.9 * 0.4 * 14 / 6)),
    "one core": (14, 6, 1, 1, 1, 1.0),
}


@pytest.mark.parametrize("profile", PROFILES.values(), ids=PROFILES)
def test_chosen_steps_per_update_fits_updates_into_the_time_that_the_trainer_waits(profile):
    wait_ms, update_ms, n_rows, n_envs, n_cores, expected = profile
    share = free_share(n_cores=n_cores, n_envs=n_envs, n_threads=1)
    times = {"wait_s": wait_ms / 1e3, "gradient_step_s": update_ms / 1e3}
    pace = chosen_pace(**times, n_rows=n_rows, share=share)
    assert pace == pytest.approx(expected, rel=0.005)
    assert pace == float(f"{pace:.3g}"), "a number that a person can type"
    assert LEAST <= pace <= MOST


@pytest.mark.parametrize("wait_ms", [0.1, 1.0, 6.0, 14.0, 30.0])
@pytest.mark.parametrize("update_ms", [0.5, 2.0, 6.0, 9.0, 20.0, 80.0])
def test_updates_with_the_chosen_steps_per_update_at_most_double_the_time_of_exchanges(
    wait_ms, update_ms
):
    """Simulate exchanges of one agent, and add up how far updates outlast the waiting time."""
    pace = chosen_pace(wait_s=wait_ms / 1e3, gradient_step_s=update_ms / 1e3, n_rows=1)
    n_exchanges, done, late_ms = 6400, 0, 0.0
    for exchange in range(1, n_exchanges + 1):
        due = int(exchange / pace) - done
        done += due
        late_ms += max(due * update_ms - wait_ms, 0.0)
    if pace < MOST:
        limit = 0.02 if update_ms <= 0.9 * wait_ms else 1.0
        assert late_ms / n_exchanges <= limit * wait_ms
