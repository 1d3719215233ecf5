"""Writes a table as a `.demo` file, after checking every field."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pipeline.core.arrays import AnyArray, BoolArray, FloatArray
from pipeline.core.specs import ActionSpec, ActionTuple, BehaviorSpec, ObservationSpec, check_spec
from pipeline.demos.demo_file import writing_demo
from pipeline.demos.tables import NO_CHOICE, Columns, Numbers, Table
from pipeline.errors import DemonstrationError
from pipeline.settings.reader import suggestion

# Distance by which an action may exceed -1..1 through rounding.
_ROUNDING = 1e-6


class _Episodes(NamedTuple):
    """The episodes of a table, given by row numbers."""

    first: AnyArray
    """int64 [E] first row of each episode."""
    last: AnyArray
    """int64 [E] last row of each episode."""
    terminated: BoolArray
    """[E] whether the task ended; False if the episode was cut short."""
    summary: str
    """Text with the number of episodes for each reason of their end."""


@np.errstate(over="ignore")  # a number that overflows float32 becomes infinite, and is refused
def import_table(
    table: Table,
    behavior: str,
    spec: BehaviorSpec,
    target: Path,
    *,
    columns: Columns | None = None,
    action_scale: Sequence[float] = (1.0,),
) -> list[str]:
    """Check every field of a table, write it as a demonstration, and return lines about it.

    Args:
        table: table with a row for each action.
        behavior: name of the behavior.
        spec: specification of the behavior.
        target: path of the `.demo` file.
        columns: column names by field, for fields that are not in the columns of the usual names.
        action_scale: divisors of the recorded continuous actions: one for all actions, or one for
            each action.

    Raises:
        DemonstrationError: A value is impossible; the error names file, row, column and remedy.
        UnitySpecificationException: A size in `spec` is impossible or too large.
    """
    # The specification is checked before the file is opened, so that an error leaves no file.
    check_spec(behavior, spec)
    columns = columns or {}
    _refuse_unknown(table, spec, columns)
    described = [
        _observation(table, index, obs_spec, columns)
        for index, obs_spec in enumerate(spec.observation_specs)
    ]
    actions, idle, actions_summary = _actions(table, spec.action_spec, columns, action_scale)
    masks = _masks(table, spec.action_spec, columns)
    reward, rewards_summary = _rewards(table, columns, idle)
    episodes = _episodes(table, columns, idle)
    returns = np.add.reduceat(reward, episodes.first)
    row, done, interrupted = _pairs(idle, episodes)
    # In a demonstration file, the reward of an action is in the pair of the next observation.
    next_reward = np.append(np.float32(0), np.where(done, np.float32(0), reward[row])[:-1])
    has_action = ~done[:, None]
    with writing_demo(target, behavior, spec) as writer:
        writer.append(
            obs=[values[row] for values, _ in described],
            actions=ActionTuple(
                actions.continuous[row] * has_action, actions.discrete[row] * has_action
            ),
            reward=next_reward,
            done=done,
            interrupted=interrupted,
            action_mask=None if masks is None else [mask[row] & has_action for mask in masks],
        )
    # The lines tell a user how the table was read, so that mistakes can be seen.
    return [
        f"read          {table.source}: {len(table)} rows, {len(episodes.first)} episodes",
        *table.notes,
        *(summary for _, summary in described),
        f"actions       {actions_summary}",
        f"rewards       {rewards_summary}; returns {_span(returns)}, mean {returns.mean():.6g}",
        f"ended by      {episodes.summary}",
        f"last obs      {int(idle.sum())} in the table, {len(row) - len(table)} repeated",
        f"wrote         {target}: {len(row)} pairs, behavior {behavior.partition('?')[0]}",
    ]


def _pairs(idle: BoolArray, episodes: _Episodes) -> tuple[AnyArray, BoolArray, BoolArray]:
    """Return each pair's row, whether it closes an episode, and whether the episode was cut short.

    If an episode has no row with its last observation, the pair that closes the episode repeats the
    last row; nothing is learned from such a pair.
    """
    # `bare` are last rows with an action: there is no observation after this action.
    bare = episodes.last[~idle[episodes.last]]
    row = np.insert(np.arange(len(idle)), bare + 1, bare)
    done = np.insert(idle, bare + 1, True)
    interrupted = done.copy()
    # Pairs that close an episode are in the order of the episodes.
    interrupted[done] = ~episodes.terminated
    return row, done, interrupted


def _refuse_unknown(table: Table, spec: BehaviorSpec, columns: Columns) -> None:
    actions = spec.action_spec
    known = [f"obs{index}" for index in range(len(spec.observation_specs))]
    known += ["continuous"] * bool(actions.continuous_size)
    known += ["discrete"] * bool(actions.discrete_size)
    known += ["reward", "terminated", "truncated", "episode"]
    known += [f"mask{branch}" for branch in range(actions.discrete_size)]
    for name in columns:
        if name not in known:
            raise DemonstrationError(
                f"{table.source}: the behavior has no field {name!r}{suggestion(name, known)} Its "
                f"fields: {', '.join(known)}"
            )


def _refuse(table: Table, numbers: Numbers, wrong: BoolArray, message: str) -> None:
    """Raise `message` for the first number where `wrong` [N, size] is True; `{}` is the number."""
    if wrong.any():
        row, number = np.argwhere(wrong)[0].tolist()
        text = message.format(f"{numbers.values[row, number]:.6g}")
        raise table.fault(row, numbers.columns[number], text)


def _observation(
    table: Table, index: int, spec: ObservationSpec, columns: Columns
) -> tuple[FloatArray, str]:
    """Return an observation [N, *shape] of a table, and a text that sums up its values."""
    name, shape = f"obs{index}", tuple(spec.shape)
    if not math.prod(shape):
        return np.zeros((len(table), *shape), np.float32), f"observation {index} {spec.name}: empty"
    numbers = table.numbers(name, math.prod(shape), columns)
    if numbers is None:
        missing = f"column {name} or {name}.0, which holds observation {index} {spec.name} {shape}"
        raise table.missing(missing, name)
    # The shape is checked, because numbers in another order (images with channels last) have the
    # same size.
    if len(numbers.shape) > 1 and numbers.shape != shape:
        raise DemonstrationError(
            f"{table.source}: {name} has the shape {numbers.shape} in each row, the behavior's "
            f"observation {spec.name} has {shape}; transpose it (images are channels first)"
        )
    # Bytes that are only 0 and 1 are taken for values in 0..1, and are not divided by 255.
    is_bytes = len(shape) == 3 and numbers.values.dtype == np.uint8
    is_bytes = is_bytes and bool(numbers.values.max(initial=0) > 1)
    values = numbers.values.astype(np.float32)
    values = values / np.float32(255) if is_bytes else values
    # Values are checked after the conversion, because a float64 may be too large for float32.
    _refuse(table, numbers, ~np.isfinite(values), "{} is not a finite number; leave out such rows")
    span = _span(values)
    span += ", bytes divided by 255" if is_bytes else ""
    summary = f"observation {index} {spec.name} {shape}: {_listed(numbers)}, {span}"
    return values.reshape(len(table), *shape), summary


def _listed(numbers: Numbers) -> str:
    names = list(dict.fromkeys(numbers.columns))
    if len(names) > 6:
        return f"columns {', '.join(names[:3])}, ... {names[-1]}"
    return f"column{'s' if len(names) > 1 else ''} {', '.join(names)}"


def _actions(
    table: Table, spec: ActionSpec, columns: Columns, scale: Sequence[float]
) -> tuple[ActionTuple, BoolArray, str]:
    """Return the actions of all rows, bool [N] True for rows without an action, and a summary."""
    kinds: list[tuple[Numbers, BoolArray]] = []
    sizes = {"continuous": spec.continuous_size, "discrete": spec.discrete_size}
    for name, size in sizes.items():
        numbers = table.numbers(name, size, columns) if size else None
        if size and numbers is None:
            raise table.missing(f"column {name} or {name}.0, which holds the actions", name)
        if numbers is not None:
            # Integer columns have no NaN, so -1 means that there is no choice.
            no_choice = (numbers.values == NO_CHOICE) & (name == "discrete")
            kinds.append((numbers, np.isnan(numbers.values) | no_choice))
    idle = np.asarray(np.concatenate([none for _, none in kinds], axis=1).all(axis=1))
    if idle.all():
        raise DemonstrationError(f"{table.source}: no row has an action to learn from; add actions")
    lacking = "an action is missing ({}), but the row has other actions; add the action"
    for numbers, none in kinds:
        _refuse(table, numbers, none & ~idle[:, None], lacking)
    out, summary = spec.empty_action(len(table)), []
    if spec.continuous_size:
        out.continuous[~idle] = _continuous(table, kinds[0][0], idle, scale)
        summary.append(f"continuous, {_listed(kinds[0][0])}: {_span(out.continuous[~idle])}")
    if spec.discrete_size:
        out.discrete[~idle] = _discrete(table, kinds[-1][0], idle, spec.discrete_branches)
        summary.append(
            f"discrete, {_listed(kinds[-1][0])}: {_span(out.discrete[~idle])}, "
            f"branches of {', '.join(map(str, spec.discrete_branches))} choices"
        )
    return out, idle, f"{'; '.join(summary)}; {int(idle.sum())} rows without an action"


def _span(values: AnyArray) -> str:
    return f"{values.min():.6g} to {values.max():.6g}"


def _continuous(
    table: Table, numbers: Numbers, idle: BoolArray, scale: Sequence[float]
) -> AnyArray:
    size = numbers.values.shape[1]
    if len(scale) not in (1, size) or not min(scale) > 0 or not math.isfinite(sum(scale)):
        raise DemonstrationError(
            f"--action-scale {','.join(f'{factor:g}' for factor in scale)}: needs one number "
            f"above 0, or {size}, one for each continuous action"
        )
    values: AnyArray = numbers.values / np.array(scale)
    # Unlike `a > b`, the expression `~(a <= b)` is also True for NaN.
    beyond = ~(np.abs(values) <= 1 + _ROUNDING) & ~idle[:, None]
    largest = np.nanmax(np.abs(numbers.values), axis=0)
    message = (
        "the action {} exceeds -1..1, the range of every continuous action; divide each action by "
        "its largest absolute value: "
        f"--action-scale {','.join(f'{max(peak, 1):.6g}' for peak in largest)}"
    )
    _refuse(table, numbers, beyond, message)
    return values[~idle]


def _discrete(table: Table, numbers: Numbers, idle: BoolArray, branches: Sequence[int]) -> AnyArray:
    choices = numbers.values
    within = (choices >= 0) & (choices < np.array(branches)) & (choices == np.rint(choices))
    sizes = ", ".join(f"0 to {size - 1}" for size in branches)
    message = f"{{}} is not a choice; choices are {sizes}; correct it, or the specification"
    _refuse(table, numbers, ~within & ~idle[:, None], message)
    return choices[~idle]


def _masks(table: Table, spec: ActionSpec, columns: Columns) -> list[BoolArray] | None:
    """Return the mask of each branch, bool [N, size], True = forbidden; None without masks."""
    sizes = {f"mask{branch}": size for branch, size in enumerate(spec.discrete_branches)}
    numbers = {name: table.numbers(name, size, columns) for name, size in sizes.items()}
    if not any(numbers.values()):
        return None
    return [_flags(table, numbers[name], size) for name, size in sizes.items()]


def _flags(table: Table, numbers: Numbers | None, size: int = 1) -> BoolArray:
    """Return a field of zeros and ones as bool [N, size]; empty entries are False."""
    if numbers is None:
        return np.zeros((len(table), size), dtype=np.bool_)
    values = numbers.values
    wrong = ~np.isin(values, (0, 1)) & ~np.isnan(values)
    _refuse(table, numbers, wrong, "{} is neither 0 nor 1; write 1 for true and 0 for false")
    return np.asarray(values == 1)


def _rewards(table: Table, columns: Columns, idle: BoolArray) -> tuple[FloatArray, str]:
    """Return the reward of each row's action, float32 [N], and a summary text."""
    numbers = table.numbers("reward", 1, columns)
    if numbers is None:
        return np.zeros(len(table), dtype=np.float32), "no column reward: zeros"
    # A row without an action has no reward; its entry may be empty.
    values = np.where(idle, 0.0, numbers.values[:, 0]).astype(np.float32)
    _refuse(table, numbers, ~np.isfinite(values)[:, None], "{} is not a finite reward; correct it")
    return values, f"{_listed(numbers)}: finite"


def _episodes(table: Table, columns: Columns, idle: BoolArray) -> _Episodes:
    """Find a table's episodes by flags, by the field `episode`, or by rows without an action."""
    n = len(table)
    fields = [table.numbers(name, 1, columns) for name in ("terminated", "truncated")]
    terminated, truncated = (_flags(table, flags)[:, 0] for flags in fields)
    flagged = terminated | truncated
    ids = table.names("episode", columns)
    if ids is None and not any(fields) and not idle.any():
        raise table.missing(
            "column terminated, truncated or episode, which says where episodes end", "terminated"
        )
    # A row without an action ends its episode; a flag in the row before belongs to the same end.
    ending: BoolArray = idle | (flagged & ~np.append(idle[1:], False))
    if ids is not None:
        ending = _by_number(table, *ids, ending)
    elif any(fields):
        unended = idle & ~flagged & ~np.append(False, flagged[:-1])
        unended[-1] = False
        if unended.any():
            raise DemonstrationError(
                f"{table.source}: {table.where(int(unended.argmax()))}: has no action, but no "
                "episode ends here; add the action, or a flag `terminated`"
            )
    last = np.flatnonzero(ending)
    # The end of the table closes an open episode.
    last = last if ending[-1] else np.append(last, n - 1)
    first = np.append(0, last[:-1] + 1)
    before = np.maximum(last - idle[last], first)  # the row of the last action may have the flag
    terminated = terminated[last] | terminated[before]
    has_flag = flagged[last] | flagged[before]
    counts = {
        "terminated": terminated.sum(),
        "truncated": (has_flag & ~terminated).sum(),
        "the next episode (as cut short)": (~has_flag[:-1]).sum(),
        "the end of the table (as cut short)": int(not has_flag[-1]),
    }
    summary = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    return _Episodes(first, last, terminated, summary)


def _by_number(table: Table, ids: AnyArray, column: str, ending: BoolArray) -> BoolArray:
    """Return whether each row ends an episode, bool [N], from the rows' episode numbers."""
    # The last row ends its episode, because no row follows.
    changes: BoolArray = np.append(ids[1:] != ids[:-1], True)
    # It is a contradiction if a flag ends the episode, but the next row has the same number.
    goes_on = ending & ~changes
    if goes_on.any():
        row = int(goes_on.argmax()) + 1
        message = f"episode {ids[row]} continues after its end; number the episodes again"
        raise table.fault(row, column, message)
    # Rows of an episode must follow each other, because their order is the order of time.
    seen: set[Any] = set()
    for row in [0, *(np.flatnonzero(changes)[:-1] + 1).tolist()]:
        if ids[row] in seen:
            message = f"episode {ids[row]} comes again after another one; sort the rows by episode"
            raise table.fault(row, column, message)
        seen.add(ids[row])
    return changes
