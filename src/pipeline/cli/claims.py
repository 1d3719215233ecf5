"""`pipeline claims`: write claims about results, and check whether other results confirm them."""

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline import files
from pipeline.cli.parser import Parser, option
from pipeline.cli.provenance import causes, differences, machine_of, read
from pipeline.dag import sources
from pipeline.dag.project import code_of
from pipeline.dag.provenance import Record
from pipeline.dag.reporting import claims, results
from pipeline.dag.reporting.claims import Answer, Lock, NoValueError, digests, shortened
from pipeline.errors import SettingsError
from pipeline.evaluation import statistics
from pipeline.evaluation.comparison import Task, compare
from pipeline.settings.project.claims import CLAIMS, LOCK, load_claims
from pipeline.settings.project.params import Params, load_params
from pipeline.settings.yaml_file import dump_yaml

# From this probability of improvement on, a difference is meaningful (Bouthillier et al. 2021,
# arXiv 2103.03098).
_MEANINGFUL = 0.75
_HEAD = """\
# Claims about the results. `pipeline claims write` writes entries, and `pipeline claims check`
# checks them. You may edit them: an entry has a value with an `interval` or a `tolerance`, or it
# compares two experiments.
"""
# An entry begins in the first column; a comment there belongs to the entry before it.
_ENTRY = re.compile(r"^(?=[^\s#])", re.MULTILINE)


class ClaimError(SettingsError):
    """A claim does not hold."""

    exit_code = 1


def add_options(parser: Parser) -> None:
    """Add the subcommands of `pipeline claims`."""
    check = parser.add_command(
        "check", "check each claim of claims.yaml against the present results", _check
    )
    check.description = (
        "Check each claim of claims.yaml against the present results. The answer is `identical` if "
        "the result files have the recorded bytes; `reproduced` if their bytes differ, but the "
        "intervals overlap, the value is within the tolerance, or the comparison holds; else "
        "`not`. If bytes differ, the first cause is named. This command runs no stage: use "
        "`pipeline run` before it. The exit code is 0 if every claim holds, 1 if a claim does not "
        "hold, 2 if a file or an option is wrong."
    )
    option(check, "--json", "print JSON")
    text = "write claims.yaml and claims.lock from the present results"
    what = "experiments of params.yaml; default: all experiments that have results of every seed"
    write = parser.add_command("write", text, _write)
    write.add_argument("experiments", nargs="*", metavar="EXPERIMENT", help=what)


def _check(arguments: argparse.Namespace) -> str:
    """Return a line for each claim, and the first cause of each difference from claims.lock.

    Raises:
        ClaimError: A claim does not hold; the answers have been printed.
    """
    root = Path.cwd()
    params, recorded = load_params(), claims.read_lock(root)
    found = claims.answers(root, params)
    if not found:
        raise SettingsError(f"{CLAIMS}: has no claim; `pipeline claims write` makes some")
    reasons = [_cause(root, params, answer, recorded) for answer in found]
    lines, rows = [], [answer.row for answer in found]
    for (name, claimed, here, verdict), reason in zip(rows, reasons, strict=True):
        lines.append(f"{verdict:10}  {name}: {claimed}; here {here}")
        lines += [f"{'':12}{line}" for line in reason]
    counts = Counter(answer.verdict for answer in found)
    text = "\n".join([*lines, "", ", ".join(f"{n} {verdict}" for verdict, n in counts.items())])
    if arguments.json:
        keys = ("claim", "claimed", "here", "answer")
        told = [dict(zip(keys, row, strict=True)) for row in rows]
        value = [one | {"cause": reason} for one, reason in zip(told, reasons, strict=True)]
        text = json.dumps(value, indent=2)
    if counts["not"]:
        # The answers are the command's result, so they go to standard output.
        sys.stdout.write(f"{text}\n")
        raise ClaimError(f"not reproduced: {counts['not']} of {len(found)} claims")
    return text


def _cause(root: Path, params: Params, answer: Answer, recorded: Lock) -> list[str]:
    """Return why an answer differs from claims.lock's; [] if identical, or without results."""
    if answer.verdict == "identical" or answer.changed is None:
        return []
    # If no result file has changed, a value in claims.yaml was edited. No record explains an edit.
    if not answer.changed:
        return [f"the result files are those of {LOCK}, so the claim itself was changed"]
    for name in filter(None, (answer.claim.experiment, answer.claim.better_than)):
        if name not in recorded:
            return [f"{LOCK} has no record of {name}: `pipeline claims write {name}` makes one"]
        old, new = sorted(map(int, recorded[name])), params.experiments[name].seeds
        both = [seed for seed in old if seed in new]
        gone, added = ([seed for seed in seeds if seed not in both] for seeds in (old, new))
        # Removed seeds are compared with added seeds in pairs: the first difference of such a pair
        # is the seed.
        for then, now in (*zip(both, both, strict=True), *zip(gone, added, strict=False)):
            history = recorded[name][str(then)]["history"]
            if cause := _first_difference(history, _history(root, name, now)):
                return [f"first cause, with seed {now}: {cause[0]}", *cause[1:]]
        if len(old) != len(new):
            return [f"first cause: number of seeds: {len(old)}, {len(new)}"]
    return [
        f"no record of a policy differs, but {answer.changed[0]} does; the cause is "
        "the evaluation's settings, an edit of the file, or the type of CPU, which decides which "
        "kernels run"
    ]


def _first_difference(then: Sequence[Record], now: Sequence[Record]) -> list[str]:
    """Return lines on the first difference between two histories; the machines come last."""
    for check in causes(then, now) if then and now else ():
        return [check.what, *check.lines("  ")]
    for one, other in zip(then, now, strict=False):
        # If the record of one machine is missing, the machines cannot be compared.
        known = one["machine"] and other["machine"]
        if known and (details := differences(one["machine"], other["machine"])):
            return [f"machine of {one['stage']}", *(f"  {line}" for line in details)]
    return []


def _history(root: Path, name: str, seed: int) -> list[Record]:
    """Return a record, with its machine, of each stage that made a run's policy."""
    history = []
    # Only the first behavior's file is read, because the files of all behaviors have the same
    # records.
    for model in sorted((root / f"results/export/{name}/seed{seed}").glob("*.onnx"))[:1]:
        for record in read(model):
            kept = ("stage", "seed", "interrupted_at_steps", *claims.SHARED)
            # The parameters are equal for all seeds if the seed, which has its own field, is left
            # out; claims.lock stores equal values once.
            params = {key: value for key, value in record["parameters"].items() if key != "seed"}
            whole = record | {"parameters": params, "machine": machine_of(model, record)}
            history.append({key: whole[key] for key in kept if key in whole})
    return history


def _write(arguments: argparse.Namespace) -> str:
    """Write claims into claims.yaml, whose other entries stay, and records into claims.lock."""
    root, params, remarks = Path.cwd(), load_params(), list[str]()
    load_claims(root)  # a mistake in claims.yaml is reported before anything is written
    named, names = arguments.experiments, []
    for name in named or params.experiments:
        try:
            claims.tasks_of(root, params, name)
            names.append(name)
        except NoValueError as reason:
            if named:
                raise SettingsError(str(reason)) from reason
            remarks.append(f"Left out: {reason}.")
    if not names:
        raise SettingsError("no experiment has results of every seed; `pipeline run` makes them")
    entries: dict[str, Any] = {}
    tasks = compare(one for one in results.outcomes(root, params) if one.experiment in names)
    for task in tasks:
        several = sum(other.environment == task.environment for other in tasks) > 1
        entries |= _of_task(task, task.behavior if several else "", remarks)
    # The text is edited entry by entry, because a YAML writer would lose the user's comments.
    path = root / CLAIMS
    head, *blocks = _ENTRY.split(path.read_text(encoding="utf-8") if path.is_file() else _HEAD)
    # The keys are the names of the entries: an entry's text begins with its name and a colon.
    texts = {block.partition(":")[0]: block for block in blocks}
    texts |= {name: dump_yaml({name: entry}) for name, entry in entries.items()}
    recorded = claims.read_lock(root)
    for name in names:
        recorded[name] = {
            str(seed): {
                "files": digests(root, params, name, seed),
                "history": _history(root, name, seed),
            }
            for seed in params.experiments[name].seeds
        }
    files.write_whole(
        path, "\n".join([head.rstrip("\n"), *(one.rstrip("\n") for one in texts.values()), ""])
    )
    files.write_whole(root / LOCK, claims.lock_text(recorded))
    # The report shows claims, so DVC must see that the claims have changed.
    if (root / "dvc.yaml").is_file():
        sources.note(root, "report", code_of(root))
    done = f"Wrote {', '.join(entries)} to {CLAIMS}, and digests of their results to {LOCK}."
    return "\n".join([f"{done} Commit both; `pipeline claims check` checks the claims.", *remarks])


def _of_task(task: Task, behavior: str, remarks: list[str]) -> dict[str, Any]:
    """Return the claims about a task by name; `behavior` is empty if it is the only one."""
    entries: dict[str, Any] = {}
    more, end = ({"behavior": behavior}, f"_{behavior}") if behavior else ({}, "")
    for one in task.standings:
        spread: dict[str, Any] = {"tolerance": 0}
        if one.interval is None:
            text = (
                f"{len(one.seeds)} seeds give no interval, so the claim holds only for this value"
            )
            remarks.append(f"{one.experiment}_iqm{end}: {text}; edit `tolerance`.")
        else:
            spread = {"interval": [*map(shortened, one.interval)]}
        value = {"metric": "iqm", "value": shortened(one.iqm)}
        about = {"experiment": one.experiment, **more}
        entries[f"{one.experiment}_iqm{end}"] = about | value | spread
    # Bonferroni correction: among many pairs, some differ by chance alone.
    limit = (1 - statistics.CONFIDENCE) / max(len(task.improvements), 1)
    for pair in task.improvements:
        name = f"{pair.better}_better_than_{pair.than}{end}"
        if pair.chance > limit or pair.probability < _MEANINGFUL:
            remarks.append(f"No claim {name} was written: the seeds show no clear difference.")
            continue
        claim = {"better_than": pair.than, "probability": _MEANINGFUL}
        entries[name] = {"experiment": pair.better, **more} | claim
    return entries
