"""Summaries on the console: lines, or a progress bar on a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TextIO

from pipeline.tracking import names, progress
from pipeline.tracking.base import Sink

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


def duration(seconds: float) -> str:
    """Return seconds as a clock shows them: 75 as `1:15`, 3675 as `1:01:15`."""
    # Seconds are rounded first, so that 59.6 s are 1:00 and not 0:60.
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def summary_line(behavior: str, values: Mapping[str, float], step: int, *, elapsed_s: float) -> str:
    """Return the line that ML-Agents logs for a summary, without the log level."""
    start = f"{behavior}. Step: {step}. Time Elapsed: {elapsed_s:.3f} s. "
    state = "Training." if values.get(names.IS_TRAINING, 1.0) else "Not Training."
    # The texts are those of ML-Agents, because scripts parse them in logs.
    if names.REWARD not in values:
        return f"{start}No episode was completed since last summary. {state}"
    parts = [f"Mean Reward: {values[names.REWARD]:.3f}."]
    if names.GROUP_REWARD in values:
        parts.append(f"Mean Group Reward: {values[names.GROUP_REWARD]:.3f}.")
    elif names.REWARD_STD in values:
        parts.append(f"Std of Reward: {values[names.REWARD_STD]:.3f}.")
    parts.append(state)
    if names.ELO in values:
        parts.append(f"ELO: {values[names.ELO]:.3f}.")
    return start + " ".join(parts)


def hyperparameters_text(settings: Mapping[str, Any], depth: int = 0) -> str:
    """Return settings as ML-Agents prints them: a tab, then two spaces for each level."""
    lines = []
    for key, value in settings.items():
        if isinstance(value, dict) and value:
            lines.append(f"\t{'  ' * depth}{key}:")
            lines.append(hyperparameters_text(value, depth + 1))
        else:
            lines.append(f"\t{'  ' * depth}{key}:\t{value}")
    return "\n".join(lines)


class ConsoleSink(Sink):
    """Prints each summary with speed and time left; on a terminal, draws a bar for each behavior.

    The time left is the time until the behavior's `max_steps`; a run without training shows none.
    If `pipeline run` has started this process, the sink also reports progress to that command.
    """

    def __init__(
        self, *, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_steps: dict[str, int] = {}
        self._stream = stream or sys.stderr
        self._clock = clock
        self._start = clock()
        self._last: dict[str, tuple[int, float]] = {}
        self._rate: dict[str, float] = {}
        self._progress: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    def on_start(self, behavior: str, settings: Mapping[str, Any]) -> None:
        """Print a behavior's settings, or the path of the log that has them."""
        if "max_steps" in settings:
            self._max_steps[behavior] = settings["max_steps"]
        text = f"Hyperparameters for behavior name {behavior}:\n{hyperparameters_text(settings)}"
        log = progress.log_aside(text)
        self.say(f"The settings of behavior {behavior} are in {log}." if log else text)

    def on_summary(self, behavior: str, values: Mapping[str, float], step: int) -> None:
        """Show one summary."""
        if behavior not in self._last and not values.get(names.IS_TRAINING, 1.0):
            # A behavior that does not learn never reaches `max_steps`, so no time left is shown.
            self._max_steps.pop(behavior, None)
        extra = self._speed(behavior, step)
        progress.tell(
            step=step,
            of=self._max_steps.get(behavior),
            reward=values.get(names.REWARD),
            rate=self._rate.get(behavior),
        )
        if self._stream.isatty():
            # A bar is redrawn in place; lines printed in between would break it.
            self._show(behavior, values, step, extra)
            return
        line = summary_line(behavior, values, step, elapsed_s=self._clock() - self._start)
        self.say(f"{line} {extra}".rstrip())

    def close(self) -> None:
        """Stop redrawing the bars, which stay on the terminal."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def say(self, line: str) -> None:
        """Print a line."""
        self._stream.write(f"[INFO] {line}\n")
        # The line should appear at once, but files and pipes are buffered.
        self._stream.flush()

    def _speed(self, behavior: str, step: int) -> str:
        """Return smoothed steps per second and time left as text; empty at the first summary."""
        now = self._clock()
        old_step, old = self._last.get(behavior, (step, now))
        self._last[behavior] = (step, now)
        # At the first summary of a behavior there is no earlier one, and the clock may show the
        # same time for two summaries that follow closely.
        if now > old and step > old_step:
            rate = (step - old_step) / (now - old)
            # Rates are averaged, so that one slow summary does not double the time left.
            self._rate[behavior] = 0.5 * (self._rate.get(behavior, rate) + rate)
        if behavior not in self._rate:
            return ""
        rate = self._rate[behavior]
        # Without `max_steps` `left` is not positive, so that no time left is shown.
        left = self._max_steps.get(behavior, 0) - step
        ending = f", {duration(left / rate)} left" if left > 0 else ""
        return f"({rate:,.0f} steps/s{ending})"

    def _show(self, behavior: str, values: Mapping[str, float], step: int, extra: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        if self._progress is None:
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.completed:,.0f} steps  {task.fields[note]}"),
                console=Console(file=self._stream),
            )
            self._progress.start()
        if behavior not in self._tasks:
            # If `total` is None, rich draws a bar that moves without showing progress.
            total = self._max_steps.get(behavior)
            self._tasks[behavior] = self._progress.add_task(behavior, total=total, note="")
        reward = f"reward {values[names.REWARD]:.3f}  " if names.REWARD in values else ""
        if names.ELO in values:
            reward += f"ELO {values[names.ELO]:.1f}  "
        self._progress.update(self._tasks[behavior], completed=step, note=f"{reward}{extra}")
