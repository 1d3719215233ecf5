"""`steps_per_update: auto`: updates fill the time in which the trainer waits for environments."""

import math

AUTO = "auto"
LEAST, MOST = 0.25, 64.0
"""Limits of the chosen pace, in agent steps for each update."""
_USED = 0.9
"""Share of the waiting time that updates may fill. The rest is a margin, because the waiting time
and the time of updates vary."""


def free_share(*, n_cores: int, n_envs: int, n_threads: int) -> float:
    """Return the share of the waiting time in which the trainer has a processor to itself."""
    # With more busy threads than cores, the system divides the cores evenly among the threads.
    return min(n_cores / (n_envs + n_threads), 1.0)


def chosen_pace(
    *, wait_s: float, gradient_step_s: float, n_rows: float, share: float = 1.0
) -> float:
    """Return the number of agent steps per update with which updates fill the waiting time.

    If one update takes longer than the waiting time of an exchange, fewer than one update per
    exchange is chosen, so that all updates together take at most as long as all waiting.

    Args:
        wait_s: seconds for which a trainer that makes no updates waits in each exchange.
        gradient_step_s: seconds of an update.
        n_rows: number of agent steps between two starts of updates: the steps of one exchange if
            updates are spread over exchanges (`threaded`), else the steps of a rollout.
        share: share of the waiting time that updates may take; see `free_share`.
    """
    # A number of updates below 1 means one update in several exchanges.
    n_fitting = _USED * share * wait_s / gradient_step_s
    if n_fitting >= 1.0:
        n_fitting = math.floor(n_fitting)  # environments would wait for the end of another update
    pace = n_rows / n_fitting if n_fitting > 0.0 else MOST
    # Three digits are kept, because more would only show the noise of the measurement.
    return float(f"{min(max(pace, LEAST), MOST):.3g}")
