"""`steps_per_update: auto`: as many updates as fit into the time that the environment works."""

from __future__ import annotations

import math

AUTO = "auto"
LEAST, MOST = 0.25, 64.0
"""Limits of what is chosen, in agent steps for each update."""
_USED = 0.9
"""Share of the waiting time that updates take: both times vary from step to step."""


def free_share(*, n_cores: int, n_envs: int, n_threads: int) -> float:
    """Return the share of the waiting time in which the trainer has its processors for itself.

    Each environment is counted as one busy thread in addition to the trainer's.
    """
    return min(n_cores / (n_envs + n_threads), 1.0)


def chosen_pace(
    *, wait_s: float, gradient_step_s: float, n_rows: float, share: float = 1.0
) -> float:
    """Return the agent steps for each update with which the waiting time hides the updates.

    Updates are made while environments work on one exchange. Several that fit are whole ones. Of
    one that is longer than the waiting time, a part of it is what fits: updates then take as much
    time as is waited in all, so experience comes at least half as fast.

    Args:
        wait_s: seconds of an exchange in which a trainer without updates waits.
        gradient_step_s: seconds of an update.
        n_rows: agent steps from one start of updates to the next: of an exchange if updates are
            spread over exchanges (`threaded`), else of a rollout.
        share: of the waiting time that updates may take; see `free_share`.
    """
    n_fitting = _USED * share * wait_s / gradient_step_s
    if n_fitting >= 1.0:
        n_fitting = math.floor(n_fitting)
    pace = n_rows / n_fitting if n_fitting > 0.0 else MOST
    return float(f"{min(max(pace, LEAST), MOST):.3g}")
