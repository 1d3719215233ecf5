"""`pipeline timers`: show how a run spent its time, and what would make it faster.

Reads `run_logs/timers.json` of `pipeline learn` and of `mlagents-learn`: a tree of seconds by name,
which includes work in other processes and threads. Shares are shares of the time that the trainer's
loop worked or waited, so that they add up to 1.
"""

import argparse
import contextlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline import machine
from pipeline.cli.parser import Parser, aligned
from pipeline.envs.base import MOST_GROUPS
from pipeline.errors import SettingsError
from pipeline.files import kind_of, similar
from pipeline.settings import RunSettings, load_run_settings
from pipeline.settings.pace import chosen_pace, free_share

_Timed = tuple[str, Mapping[str, Any], bool]
"""Name and content of a timer's node, and whether a thread other than the loop's measured it."""

_LOOP = "TrainerController.start_learning"
_PART_NODES = {
    "environment": ("communicator.exchange",),
    "wire": ("codec", "UnityEnvironment._generate_step_input", "steps_from_proto"),
    "inference": ("TorchPolicy.evaluate",),
    "storage": ("process_trajectory",),
    "update": ("_update_policy",),
    "compile": ("compile",),
    "saving": ("TrainerController._save_models",),
}
"""Parts of a run, and the names of the nodes that measure each part."""
_WAITS = "environment"
# ML-Agents' timers contain its command line, which may set the number of environments.
_N_ENVS = re.compile(r"--num-envs[= ](\d+)")
_BAR = 30
_MORE_ENVS = 4
_WORTH_SAYING = 1.05
"""Smallest predicted speed-up that is shown; smaller speed-ups are within the differences between
equal runs."""
_NOTHING = 0.05
"""If the loop waited for less than this fraction of the updates' time, no waiting time was
measured."""
_DECISIVE = 0.5
"""Minimum share of the time for which a part of the run gets its own advice."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """Times of one run, in seconds."""

    program: str
    loop_s: float
    """Seconds from the first reset to the end."""
    parts: Mapping[str, float]
    """Seconds of each part of `_PART_NODES`; for `environment` the seconds that the loop waited."""
    parallel: frozenset[str]
    """Parts that ran in another thread in parallel with the loop."""
    working_s: float
    """Seconds that each environment worked, also while the loop did other work."""
    idle_s: float = 0.0
    """Seconds in which the thread of the updates stored experience or waited for it."""
    n_exchanges: int | None
    """Number of exchanges with each environment; None if unknown."""
    n_minibatches: int | None
    hidden: frozenset[str] = frozenset()
    """Parts that the trainer did while it waited for the environments."""
    pace: float | None = None
    """The `steps_per_update` with which updates fill the waiting time; see `_fitting_pace`."""

    @property
    def steady_s(self) -> float:
        """Seconds of the loop without compiling, which happens once."""
        return self.loop_s - self.parts["compile"]

    @property
    def other_s(self) -> float:
        """Seconds of the loop outside all parts."""
        named = sum(s for part, s in self.parts.items() if part not in self.parallel)
        return max(self.loop_s - named, 0.0)

    def after(self, *, n_times: int = 1, threaded: bool | None = None) -> float:
        """Return the predicted speed-up of collecting experience, given enough cores.

        Environments step in parallel, but their messages are read and stored one by one; a batch of
        decisions takes about the same time for any number of agents. Several environments step in
        groups: one group works while the trainer handles the others. With `threaded` the update
        uses the time in which the trainer would wait, and adds time only if it takes longer.

        Args:
            n_times: factor on the number of environments.
            threaded: whether updates are spread over the steps; None for no change.
        """
        parts, hidden = self.parts, self.hidden
        # The environments work while the loop waits, and while the trainer does the hidden parts.
        working = parts[_WAITS] + sum(parts[part] for part in hidden)
        if threaded:
            hidden = hidden | {"update"}
        # More environments give more experience, and all of it must be stored and learned from.
        scaling = {"wire", "storage", "saving", "update"} - self.parallel
        meanwhile = sum(n_times * parts[part] for part in scaling & hidden)
        between = sum(n_times * parts[part] for part in scaling - hidden - {"update"})
        n_groups = min(n_times, MOST_GROUPS)
        between += parts["inference"] * n_groups + self.other_s
        # A round takes one group's share of the trainer's work and its environments' work, or the
        # trainer's work for all groups, whichever is longer.
        spent = max(between / n_groups + working, between + meanwhile)
        if "update" in self.parallel:  # ML-Agents updates in a thread, in parallel with all of this
            spent = max(spent, n_times * parts["update"])
        elif "update" not in hidden:
            spent += n_times * parts["update"]
        return n_times * self.steady_s / spent


def add_options(parser: Parser) -> None:
    """Add the options of `pipeline timers`."""
    parser.add_argument("file", type=Path, help="run_logs/timers.json, or the folder of a run")
    text = "a second file or folder to compare with"
    parser.add_argument("other", type=Path, nargs="?", help=text)


def run(arguments: argparse.Namespace) -> str:
    """Return the times of one run with advice, or a table with the times of two runs."""
    first = read(arguments.file)
    if arguments.other is None:
        return "\n".join([*_described(arguments.file, first), "", *_advice(first)])
    second = read(arguments.other)
    rows = [("", "first", "", "second", "", "second / first")]
    for part in (*_PART_NODES, "other", "all"):
        first_s, second_s = _seconds(first, part), _seconds(second, part)
        if not first_s and not second_s:
            continue
        shares = _share(first, part), _share(second, part)
        ratio = f"{second_s / first_s:.2f}" if first_s else ""
        rows.append((part, f"{first_s:.1f} s", shares[0], f"{second_s:.1f} s", shares[1], ratio))
    files = ((arguments.file, first), (arguments.other, second))
    titles = [f"{path}: {times.program}" for path, times in files]
    return "\n".join([*titles, "", *aligned(rows, first_number=1)])


def read(path: Path) -> Times:
    """Return the times in a timers.json, or in the timers.json of a run's folder.

    Raises:
        SettingsError: The file cannot be read, or has no timers of a training.
    """
    if (path / "run_logs/timers.json").exists():
        path /= "run_logs/timers.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        hint = similar(path) or "; give a run's folder, or its run_logs/timers.json"
        reason = error.strerror or str(error)
        raise SettingsError(f"{path}: cannot be read ({reason}){hint}") from error
    except ValueError as error:
        kind = kind_of(path) or f"is not JSON ({error}); give a timers.json"
        raise SettingsError(f"{path}: {kind}") from error
    try:
        return _times(content, path.parent.parent / "configuration.yaml")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SettingsError(
            f"{path}: has no timers of a training ({error!r}); give a timers.json of "
            "`pipeline learn` or `mlagents-learn`"
        ) from error


def _settings(configuration: Path) -> RunSettings:
    """Return the settings of a run; the defaults if its file cannot be read."""
    with contextlib.suppress(SettingsError):
        return load_run_settings(configuration)
    return RunSettings()


def _times(content: Mapping[str, Any], configuration: Path) -> Times:
    metadata = content.get("metadata", {})
    theirs = f"mlagents-learn {metadata.get('mlagents_version', '')}"
    program = str(metadata.get("trainer", theirs))
    nodes = list(_nodes(content, parallel=False))
    (loop,) = (node for name, node, _ in nodes if name == _LOOP)
    parts = {part: _total(nodes, names) for part, names in _PART_NODES.items()}
    update_apart_s = _total(nodes, _PART_NODES["update"], apart=True)
    parts["update"] += update_apart_s - parts["compile"]
    working_s = parts[_WAITS]
    if any(name == "worker_root" for name, *_ in nodes):
        # ML-Agents adds up the times of all environment processes, but does not always wait for all
        # processes.
        option = _N_ENVS.search(str(metadata.get("command_line_arguments", "")))
        n_envs = int(option[1]) if option else _settings(configuration).env_settings.num_envs
        # The environments worked at the same time, so dividing the sum by their number gives the
        # time of one environment.
        working_s /= n_envs
        exchanged_s = working_s + parts["wire"] / n_envs
        stepping_s = _total(nodes, ("env_step",)) or float(loop["total"])
        waited = min(1.0, (stepping_s - parts["inference"]) / exchanged_s) if exchanged_s else 1.0
        parts |= {"wire": parts["wire"] / n_envs * waited, _WAITS: working_s * waited}
    counts = {name: node.get("count") for name, node, _ in nodes}
    steps, updates = counts.get("env_step"), counts.get("_update_policy")
    hidden = set()
    # Only `pipeline learn` writes this key; it stores and learns while environments work.
    if "trainer" in metadata:
        hidden.add("storage")
        # A `threaded` update is always hidden behind the steps of the environments; any other
        # update only if it is shorter than a step.
        if any(behavior.threaded for behavior in _settings(configuration).behaviors.values()) or (
            steps and updates and parts["update"] / updates < float(loop["total"]) / steps
        ):
            hidden.add("update")
    counted = {"n_exchanges": steps or 0, "n_updates": updates or 0}
    return Times(
        pace=_fitting_pace(metadata, _settings(configuration), parts, **counted),
        hidden=frozenset(hidden),
        program=program,
        loop_s=float(loop["total"]),
        parts=parts,
        parallel=frozenset({"update"} if update_apart_s else ()),
        working_s=working_s,
        idle_s=_total(nodes, _PART_NODES["storage"], apart=True),
        n_exchanges=None if steps is None else int(steps),
        n_minibatches=counts.get("TorchPPOOptimizer.update"),
    )


def _fitting_pace(
    metadata: Mapping[str, Any],
    settings: RunSettings,
    parts: Mapping[str, float],
    *,
    n_exchanges: int,
    n_updates: int,
) -> float | None:
    """Return the `steps_per_update` with which updates fill the waiting time.

    None unless exactly one behavior learned from a replay; NaN if no waiting time was measured.
    """
    n_done, n_rows, n_rollouts = (
        int(metadata.get(key, 0)) for key in ("gradient_steps", "agent_steps", "rollouts")
    )
    if len(settings.behaviors) != 1 or not (n_done and n_rollouts and n_exchanges):
        return None
    # With several behaviors the waiting time could not be assigned to one behavior.
    (behavior,) = settings.behaviors.values()
    update_s, waited_s = parts["update"], parts[_WAITS]
    # `n_busy` is the number of exchanges with updates. Updates are spread over as many exchanges as
    # possible if the behavior is `threaded`; otherwise each update fills one exchange.
    n_busy = min(n_done if behavior.threaded else n_updates, n_exchanges)
    wait_s = (waited_s + update_s) / n_exchanges
    # If each exchange had an update that took longer than the environments, the loop never waited.
    if n_busy == n_exchanges and waited_s < _NOTHING * update_s:
        return math.nan
    # If an update takes longer than the environments, the loop waits only in exchanges without an
    # update.
    if wait_s < update_s / n_busy:
        wait_s = waited_s / (n_exchanges - n_busy)
    n_envs = settings.env_settings.num_envs
    return chosen_pace(
        wait_s=wait_s,
        gradient_step_s=update_s / n_done,
        n_rows=n_rows / (n_exchanges if behavior.threaded else n_rollouts),
        share=free_share(n_cores=machine.n_processors(), n_envs=n_envs, n_threads=1),
    )


def _total(nodes: Sequence[_Timed], names: Sequence[str], *, apart: bool = False) -> float:
    """Return the seconds of the named nodes in the loop's thread, or with `apart` in others."""
    chosen = (node for name, node, in_thread in nodes if name in names and in_thread == apart)
    return sum(float(node["total"]) for node in chosen)


def _nodes(tree: Mapping[str, Any], *, parallel: bool) -> Iterator[_Timed]:
    """Yield all nodes of a tree below its root; `parallel` nodes are from another thread."""
    for name, node in (tree.get("children") or {}).items():
        apart = parallel or name == "trainer_threads"
        yield name, node, apart
        yield from _nodes(node, parallel=apart)


def _seconds(times: Times, part: str) -> float:
    named = {**times.parts, "other": times.other_s, "all": times.loop_s}
    return float(named[part])


def _share(times: Times, part: str) -> str:
    """Return a part's share of the loop's time as text; empty for a part in another thread."""
    is_in_loop = times.loop_s and part not in times.parallel
    return f"{_seconds(times, part) / times.loop_s:.0%}" if is_in_loop else ""


def _described(path: Path, times: Times) -> list[str]:
    counted = "" if times.n_exchanges is None else f", {times.n_exchanges:,} exchanges"
    lines = [f"{path}: {times.program}, {times.loop_s:.1f} s of training{counted}", ""]
    rows = []
    for part in (*_PART_NODES, "other"):
        seconds = _seconds(times, part)
        if not seconds:
            continue
        share, notes = _share(times, part), []
        bar = "█" * round(_BAR * seconds / times.loop_s) if share else ""
        if part in times.parallel:
            notes.append("in parallel with the loop")
        if part == _WAITS and times.n_exchanges:
            notes.append(f"{1e3 * seconds / times.n_exchanges:.1f} ms an exchange")
        if part == _WAITS and times.working_s > seconds:
            works = f"each environment works {times.working_s:.1f} s"
            notes.append(f"{works}, also in parallel with the loop")
        if part == "update" and times.n_minibatches:
            notes.append(f"{1e3 * seconds / times.n_minibatches:.1f} ms a minibatch")
        rows.append((f"  {part}", f"{seconds:.1f} s", share, bar, ", ".join(notes)))
    if times.idle_s:
        note = "the updates' thread waits for experience and stores it, in parallel with the loop"
        rows.append(("  (update)", f"{times.idle_s:.1f} s", "", "", note))
    return lines + aligned(rows)


def _advice(times: Times) -> list[str]:
    waiting = times.working_s
    if not times.steady_s or not waiting:
        return ["No time in the environment was measured, so nothing can be predicted."]
    faster = times.steady_s / waiting
    lines = [
        f"If the trainer took no time, the run would be {faster:.1f} times as fast; the remaining "
        "time is spent in the environment.",
        "Changes that help, best first:",
    ]
    more = f"{_MORE_ENVS} times as many environments"
    changes = {f"{more} (num_envs)": times.after(n_times=_MORE_ENVS)}
    if "update" not in times.parallel | times.hidden:
        changes["threaded: true"] = times.after(threaded=True)
        both = times.after(n_times=_MORE_ENVS, threaded=True)
        changes[f"threaded: true and {more}"] = both
    helpful = [(n, r) for n, r in changes.items() if r >= _WORTH_SAYING]
    helpful.sort(key=lambda item: -item[1])
    rows = [(f"  {name}", f"about {ratio:.1f} times as fast") for name, ratio in helpful]
    lines += aligned(rows) if rows else ["  neither more environments nor threaded: true"]
    if waiting / times.steady_s >= _DECISIVE:
        lines.append(
            "  The environment takes most of the time: raise --time-scale, turn graphics off, put "
            "more agents into the scene, or let the agents decide less often (decision period)."
        )
    if times.parts["update"] / times.steady_s >= _DECISIVE:
        lines.append(
            "  The update takes most of the time: compare torch_settings.device cpu with cuda, "
            "or use smaller networks, fewer epochs or larger minibatches."
        )
    if times.pace is not None:
        lines.append(
            "  How many updates fit into an exchange is unknown: the updates took longer than each "
            "exchange. Measure with a larger steps_per_update, or with auto."
            if math.isnan(times.pace)
            else f"  steps_per_update: {times.pace:g} fills the time in which environments work."
        )
    return lines
