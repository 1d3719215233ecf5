"""What do resume points cost? The share of training time that goes into them, and the bytes.

    python benchmarks/resume_points.py                  collector_ppo of params.yaml, and SAC
    python benchmarks/resume_points.py --seconds 120    how long each trains at least

Environments are executables. SAC trains with a replay of 500,000 rows that is full from the start,
once as it is and once with the whole replay in each resume point, as it was written before. Its
first resume point has all rows in both, and is left out: in a run the replay fills while points are
written. CPU seconds are those of the trainer. Counted is the moment at which all is copied and the
one at which it is written, when the environments' states have come.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from kills import say
from tables import table

from pipeline import Callback, trainer
from pipeline.data.replay import Replay
from pipeline.settings import load_run_settings
from pipeline.settings.nodes import merge, to_plain, undotted
from pipeline.settings.project.params import load_params
from pipeline.simulators.pack import pack
from pipeline.trainer.checkpoints import manager
from pipeline.trainer.checkpoints.replay_files import save_new_rows, save_replay
from pipeline.trainer.checkpoints.resume_points import ResumePoints

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pipeline.settings import RunSettings

ROOT = Path(__file__).resolve().parents[1]
ROWS = 500_000
ENDLESS = 100_000_000
PPO = "collector_ppo"


@dataclass
class Meter:
    """Times what resume points take, and when each of them began."""

    seconds: list[tuple[float, float]] = field(default_factory=list)
    """CPU and clock, of each resume point."""
    began: tuple[float, float] = (0.0, 0.0)
    measured: tuple[float, float] = (0.0, 0.0)
    """CPU and clock of the training since the first resume point, later ones included."""

    is_inside: bool = False

    def timed(self, call: Callable[..., Any], *, begins: bool) -> Callable[..., Any]:
        """Return the call with its time added to a new resume point, or to the last one."""

        def wrapped(*arguments: Any, **named: Any) -> Any:
            if self.is_inside:
                return call(*arguments, **named)
            self.is_inside, start = True, clocks()
            try:
                return call(*arguments, **named)
            finally:
                spent, before = since(start), (0.0, 0.0) if begins else self.seconds.pop()
                self.seconds.append((before[0] + spent[0], before[1] + spent[1]))
                if len(self.seconds) == 1:
                    self.began = clocks()
                self.measured = since(self.began)
                self.is_inside = False

        return wrapped


def clocks() -> tuple[float, float]:
    """Return CPU seconds of this process, and the clock."""
    return time.process_time(), time.monotonic()


def since(start: tuple[float, float]) -> tuple[float, float]:
    """Return the time that has passed on both clocks."""
    now = clocks()
    return now[0] - start[0], now[1] - start[1]


def fill(replay: Replay, rng: np.random.Generator) -> None:
    """Fill a replay with rows that are as large as real ones."""
    n = replay.capacity
    state = replay.state_dict()
    rows = {
        name: rng.random((n, *values.shape[1:])).astype(values.dtype)
        for name, values in state.items()
    }
    replay.extend(rows | {"place": np.arange(n)})


class _EndsAt(Callback):
    """Ends a run at a time of the monotonic clock."""

    def __init__(self, end: float) -> None:
        self._end = end

    def on_exchange(self, steps: Mapping[str, int], n_episodes: Mapping[str, int]) -> None:  # noqa: ARG002
        """Ask for the end when the time has come."""
        self.stop = time.monotonic() > self._end


def measured(build: Path, settings: RunSettings, seconds: float, *, full: bool = False) -> Meter:
    """Train in an executable for `seconds`, and return the times of the resume points."""
    meter, filled = Meter(), Replay.__init__

    def init(self: Replay, *arguments: Any, **named: Any) -> None:
        filled(self, *arguments, **named)
        fill(self, np.random.default_rng(1))

    begin, complete, end = ResumePoints.begin, ResumePoints.complete, time.monotonic() + seconds
    ResumePoints.begin = meter.timed(begin, begins=True)  # type: ignore[method-assign]
    ResumePoints.complete = meter.timed(complete, begins=False)  # type: ignore[method-assign]
    Replay.__init__ = init if full else filled  # type: ignore[method-assign]
    try:
        with tempfile.TemporaryDirectory() as folder:
            job = trainer.JobSpec(build, settings, seed=1, run_dir=Path(folder))
            trainer.train(job, callbacks=[_EndsAt(end)])
    finally:
        ResumePoints.begin, ResumePoints.complete = begin, complete  # type: ignore[method-assign]
        Replay.__init__ = filled  # type: ignore[method-assign]
    return meter


def row(name: str, meter: Meter) -> tuple[str, ...]:
    """Return the cells of a row: all resume points but the first."""
    later = meter.seconds[1:]
    spent = [sum(column) for column in zip(*later, strict=True)] if later else [0.0, 0.0]
    share = [part / max(total, 1e-9) for part, total in zip(spent, meter.measured, strict=True)]
    cells = (f"{1000 * seconds / max(len(later), 1):.0f} ms" for seconds in spent)
    return (name, str(len(later)), *cells, *(f"{100 * fraction:.2f} %" for fraction in share))


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=120.0)
    seconds = parser.parse_args().seconds
    params = load_params(ROOT / "params.yaml")
    longer = undotted({"behaviors.FoodCollector.max_steps": ENDLESS}, "")
    overrides = to_plain(merge(undotted(params.overrides(PPO), ""), longer))
    ppo = load_run_settings(ROOT / params.experiment(PPO).trainer, overrides=overrides)
    at = "behaviors.3DBall.hyperparameters"
    replay_settings = {f"{at}.save_replay_buffer": True, f"{at}.buffer_size": ROWS}
    of_sac = {**replay_settings, "behaviors.3DBall.max_steps": ENDLESS}
    sac = load_run_settings(ROOT / "config/sac/3DBall.yaml", overrides=of_sac)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, simulator, settings, save in (
            (PPO, "collector", ppo, save_new_rows),
            ("SAC, new rows", "balance_ball", sac, save_new_rows),
            ("SAC, whole replay", "balance_ball", sac, save_replay),
        ):
            manager.save_new_rows = save
            build = pack(simulator, Path(folder) / simulator)
            rows.append(row(name, measured(build, settings, seconds, full="SAC" in name)))
            say(str(rows[-1]))
    say(
        table(("training", "points", "CPU each", "clock each", "of CPU", "of clock"), rows),
        sys.stdout,
    )


if __name__ == "__main__":
    main()
