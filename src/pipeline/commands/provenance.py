"""`pipeline provenance`: what made an ONNX policy, and would the present tree make it again?"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pipeline import files, machine
from pipeline.commands.engines import MOST_COMMITS
from pipeline.errors import ExportError, PipelineError
from pipeline.stages.shared import provenance, run_context, sources
from pipeline.stages.shared.attempt import WORK, digest_of, read_map
from pipeline.stages.shared.project import checkout, code_of
from pipeline.tracking.run_metadata import flattened, git, leaves

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Mapping, Sequence

    from pipeline.commands.parser import Parser

Verdict = Literal["same", "differs", "unknown"]
_MOST_SHOWN = 12
_TEXTS = ("stage", "run", "parameters_sha256", "code_sha256")


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One thing that the policy was made from, compared with what the tree has now."""

    what: str
    verdict: Verdict
    details: tuple[str, ...] = ()
    """What differs, or why it is not known."""


def add_options(parser: Parser) -> None:
    """Add the options of `pipeline provenance`."""
    parser.add_argument("file", type=Path, help="an .onnx file of `export` or `pipeline learn`")
    parser.add_argument(
        "--tree", type=Path, help="the checkout to compare with; default: the present folder's"
    )
    parser.add_argument(
        "--diff",
        type=Path,
        metavar="OTHER",
        help="compare with another file instead, and name the first cause by which they may differ",
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def run(arguments: argparse.Namespace) -> str:
    """Say what made a policy, and whether a tree would make the same."""
    if arguments.diff is not None:
        return _compared(arguments.diff, arguments.file)
    stages = read(arguments.file)
    root = _root(arguments.tree)
    checks = [_code(stages, root)]
    checks += [check for stage in stages for check in _checks(stage, root)]
    checks.append(_versions(stages[-1]))
    blobs = {f"src/{name}": blob for stage in stages for name, blob in stage["sources"].items()}
    commit, reason = commit_with(root, blobs)
    if arguments.json:
        value = {
            "stages": stages,
            "commit": {"commit": commit, "told": reason},
            "checks": [asdict(check) for check in checks],
            "verdict": _overall(checks),
        }
        return json.dumps(value, indent=2, sort_keys=True)
    return "\n".join([*_described(arguments.file, stages, reason), *_judged(checks)])


def _compared(one: Path, two: Path) -> str:
    """Say by what two files may differ, in the order in which one thing leads to the next."""
    histories = read(one), read(two)
    digests = files.sha256_of(one), files.sha256_of(two)
    head = [f"{path}\n  sha256 {digest}" for path, digest in zip((one, two), digests, strict=True)]
    if digests[0] == digests[1]:
        return "\n".join([*head, "They are the same bytes."])
    causes = [*_causes(*histories), *_machines((one, two), *histories)]
    if not causes:
        explanation = (
            "Nothing that is recorded differs. What is left is the machine: its kind of processor, "
            "which decides which kernels run. `machine` in results/.work/<stage>/<run>/stage.json, "
            "or run_logs/machine.json, names it, and is compared where both files lie below it."
        )
        return "\n".join([*head, explanation])
    lines = [*head, f"The first cause by which they may differ: {causes[0].what}"]
    for number, check in enumerate(causes):
        lines += [] if number == 0 else [f"also: {check.what}"]
        lines += [f"  {detail}" for detail in check.details[:_MOST_SHOWN]]
        if len(check.details) > _MOST_SHOWN:
            lines.append(f"  and {len(check.details) - _MOST_SHOWN} more")
    return "\n".join(lines)


def _causes(one: Sequence[provenance.Record], two: Sequence[provenance.Record]) -> Iterator[Check]:
    stages = [[record["stage"] for record in history] for history in (one, two)]
    if stages[0] != stages[1]:
        stages_differ = f"{' -> '.join(stages[0])} here, {' -> '.join(stages[1])} there"
        yield Check(what="stages", verdict="differs", details=(stages_differ,))
        return
    for left, right in zip(one, two, strict=True):
        old, new = (dict(flattened(stage["parameters"])) for stage in (left, right))
        parts: list[tuple[str, Mapping[str, Any], Mapping[str, Any]]] = [
            ("seed", {"seed": left["seed"]}, {"seed": right["seed"]}),
            ("parameters", old, new),
            ("inputs", _digests(left), _digests(right)),
            ("versions", left["versions"], right["versions"]),
            ("sources", left["sources"], right["sources"]),
            ("interruptions", _interruptions(left), _interruptions(right)),
        ]
        for what, mine, other in parts:
            keys = [key for key in {**mine, **other} if mine.get(key) != other.get(key)]
            details = tuple(f"{key}: {_shown(mine, key)}, {_shown(other, key)}" for key in keys)
            if details:
                yield Check(what=f"{what} of {left['stage']}", verdict="differs", details=details)


def _machines(
    paths: tuple[Path, Path], one: Sequence[provenance.Record], two: Sequence[provenance.Record]
) -> Iterator[Check]:
    """Compare the machines on which two files were made, where the run's folder tells them."""
    for left, right in zip(one, two, strict=False):
        mine, other = _machine_of(paths[0], left), _machine_of(paths[1], right)
        if not mine or not other:
            continue
        keys = [key for key in sorted({**mine, **other}) if mine.get(key) != other.get(key)]
        details = tuple(f"{key}: {_shown(mine, key)}, {_shown(other, key)}" for key in keys)
        if details:
            yield Check(what=f"machine of {left['stage']}", verdict="differs", details=details)


def _machine_of(path: Path, record: provenance.Record) -> dict[str, Any]:
    """Return what was noted of the machine while a record was made; nothing if it is not there."""
    stage, run = record["stage"], Path(record["run"])
    for folder in path.resolve().parents:
        recorded: Any
        if stage == "learn":
            recorded = read_map(folder / "run_logs/machine.json")
        elif run.is_absolute() or ".." in run.parts:  # the file may come from anywhere
            return {}
        else:
            facts = read_map(folder / WORK / stage / run / "stage.json")
            of_it = facts.get("fingerprint") == record.get("fingerprint")
            recorded = facts.get("machine", {}) if of_it else {}
        if isinstance(recorded, dict) and isinstance(recorded.get("variables"), dict):
            return machine.decisive(recorded)
    return {}


def _digests(record: provenance.Record) -> dict[str, str]:
    return {f"{kind} {one['name']}": one["sha256"] for kind, one in record["inputs"].items()}


def _interruptions(record: provenance.Record) -> dict[str, Any]:
    steps = record.get("interrupted_at_steps")
    return {"not exact, at steps": steps} if steps else {}


def read(model: Path) -> list[provenance.Record]:
    """Return the records in a file's metadata, those of the first stage first."""
    from pipeline.export.layout import load

    held = {prop.key: prop.value for prop in load(model).metadata_props}
    if provenance.KEY not in held:
        raise ExportError(
            f"{model}: does not say what made it; it comes from another program or an earlier "
            "version: export it again from its checkpoint's run"
        )
    try:
        value = json.loads(held[provenance.KEY])
        is_known = value["format"] == provenance.FORMAT
        stages: list[provenance.Record] = value["stages"] if is_known else []
        readable = all(_is_record(one) for one in stages)
    # The file may come from anywhere; deeply nested JSON ends in a RecursionError.
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ExportError(f"{model}: its provenance cannot be read ({error})") from error
    if not readable:
        raise ExportError(f"{model}: its provenance is damaged; export it again from its run")
    if not stages:
        raise ExportError(
            f"{model}: its provenance has another format; use the version that made it"
        )
    return stages


def _is_record(one: Any) -> bool:
    """Return whether this has all that is read of a record."""
    return (
        isinstance(one, dict)
        and all(isinstance(one.get(key), str) for key in _TEXTS)
        and (one["stage"] == "learn" or isinstance(one.get("experiment"), str))
        and isinstance(one.get("seed"), int)
        and isinstance(one.get("parameters"), dict)
        and isinstance(one.get("inputs"), dict)
        and isinstance(one.get("interrupted_at_steps", []), list)
        and all(_is_texts(entry, "name", "sha256") for entry in one["inputs"].values())
        and all(_is_texts(one.get(key)) for key in ("versions", "sources"))
    )


def _is_texts(value: Any, *needed: str) -> bool:
    return (
        isinstance(value, dict)
        and all(isinstance(text, str) for text in value.values())
        and all(key in value for key in needed)
    )


def _root(tree: Path | None) -> Path:
    if tree is not None and not (tree / "src/pipeline").is_dir():
        raise ExportError(f"{tree}: is not a checkout of this project: it has no src/pipeline")
    here = tree or Path.cwd()
    return here if code_of(here) != here or (here / "src/pipeline").is_dir() else checkout()


def commit_with(root: Path, blobs: Mapping[str, str]) -> tuple[str | None, str]:
    """Return the newest commit of any branch with given files, or None, and what to say of it.

    `blobs` has git's id of each file's content, by its path in the repository.
    """
    # Only commits that changed `src`: all others hold the same sources as one of these.
    log = git(root, "log", "--all", f"-n{MOST_COMMITS}", "--format=%H %cs %s", "--", "src")
    if log is None:
        return None, "not known: there is no git repository here"
    lines = log.splitlines()
    for line in lines:
        commit = line.partition(" ")[0]
        listed = git(root, "ls-tree", "-r", "--full-tree", commit, "--", "src") or ""
        # each line: mode, type and id, then the path after a tab
        facts = (entry.partition("\t") for entry in listed.splitlines())
        held = {path: fact.split()[2] for fact, _, path in facts}
        if all(held.get(path) == blob for path, blob in blobs.items()):
            return commit, f"{line} (the newest change of src with these sources)"
    return None, (
        f"none of the last {len(lines)} that changed src has these sources: they were not "
        "committed, or elsewhere"
    )


def _checks(stage: provenance.Record, root: Path) -> Iterator[Check]:
    name = stage["stage"]
    if name == "learn":
        why = "they came from the command line of `pipeline learn`, not from the tree"
        yield Check(what="parameters of learn", verdict="unknown", details=(why,))
    else:
        yield _parameters(stage, root)
    for kind, one in stage["inputs"].items():
        yield _input(kind, one, root)
    if steps := stage.get("interrupted_at_steps"):
        why = f"it was interrupted at steps {', '.join(map(str, steps))}, and did not go on exactly"
        yield Check(what=f"interruptions of {name}", verdict="differs", details=(why,))


def _code(stages: Sequence[provenance.Record], root: Path) -> Check:
    """Check the code of all stages at once: a shared source is stored with the first alone."""
    details = []
    for name, blob in (item for stage in stages for item in stage["sources"].items()):
        file = sources.src_of(code_of(root)) / name
        if not file.is_file():
            details.append(f"src/{name} is not there")
        elif sources.git_id(file) != blob:
            details.append(f"src/{name} has changed")
    return _check("code", list(dict.fromkeys(details)))


def _parameters(stage: provenance.Record, root: Path) -> Check:
    what = f"parameters of {stage['stage']}"
    try:
        run = run_context.find(root, stage["experiment"], stage["seed"])
        now = _parameters_now(stage["stage"], run)
    except PipelineError as error:
        return Check(what=what, verdict="differs", details=(str(error),))
    # Through JSON, as the record went: tuples are lists there, and keys are texts.
    old, new = (dict(flattened(json.loads(json.dumps(one)))) for one in (stage["parameters"], now))
    details = [
        f"{key}: {_shown(old, key)} then, {_shown(new, key)} now"
        for key in sorted({*old, *new})
        if old.get(key, _ABSENT) != new.get(key, _ABSENT)
    ]
    return _check(what, details)


_ABSENT = object()


def _parameters_now(stage: str, run: run_context.Run) -> Mapping[str, Any]:
    if stage == "train":
        return provenance.train_parameters(run)
    if stage == "pretrain":
        from pipeline.stages.pretrain import job_of as pretraining

        return pretraining(run).params
    from pipeline.stages.export import job_of as exporting

    return exporting(run).params


def _input(kind: str, one: Mapping[str, str], root: Path) -> Check:
    what = f"{kind} {one['name']}"
    path = one.get("path")
    # A path out of a file that somebody sent must not make this command read outside the tree.
    elsewhere = path is None or Path(path).is_absolute() or ".." in Path(path).parts
    if path is None or elsewhere or not (root / path).exists():
        where = "its place is not in the file" if path is None else f"{path} is not in the tree"
        return Check(what=what, verdict="unknown", details=(where,))
    now = digest_of(root / path)
    return _check(what, [] if now == one["sha256"] else [f"{path} has another content"])


def _versions(stage: provenance.Record) -> Check:
    now = {name: provenance.installed(name) for name in stage["versions"]}
    details = [
        f"{name} {then} then, {now[name]} now"
        for name, then in stage["versions"].items()
        if now[name] != then
    ]
    return _check("packages", details)


def _check(what: str, details: Sequence[str]) -> Check:
    return Check(what=what, verdict="differs" if details else "same", details=tuple(details))


def _shown(values: Mapping[str, Any], key: str) -> str:
    return json.dumps(values[key]) if key in values else "absent"


def _overall(checks: Sequence[Check]) -> Verdict:
    verdicts = {check.verdict for check in checks}
    if "differs" in verdicts:
        return "differs"
    return "unknown" if "unknown" in verdicts else "same"


def _described(model: Path, stages: Sequence[provenance.Record], commit: str) -> list[str]:
    last = stages[-1]
    lines = [f"{model}", f"  file       sha256 {files.sha256_of(model)}"]
    lines.append(f"  run        {last['run']}, seed {last['seed']}")
    lines.append(f"  commit     {commit}")
    packages = ", ".join(f"{name} {version}" for name, version in last["versions"].items())
    lines.append(f"  packages   {packages}")
    for stage in stages:
        lines.append(f"  {stage['stage']}")
        if steps := stage.get("interrupted_at_steps"):
            which = ", ".join(map(str, steps))
            lines.append(
                f"    interrupted at steps {which}, not exact (docs/explanation/resume.md)"
            )
        lines.append(f"    code        sha256 {stage['code_sha256']}")
        lines.append(f"    parameters  sha256 {stage['parameters_sha256']}")
        for kind, one in stage["inputs"].items():
            lines.append(f"    {kind} {one['name']}  sha256 {one['sha256']}")
        lines += [
            f"      {key} = {json.dumps(value)}" for key, value in leaves(stage["parameters"])
        ]
    return lines


def _judged(checks: Sequence[Check]) -> list[str]:
    lines = ["", "Beside the present tree:"]
    for check in checks:
        lines.append(f"  {check.verdict:8} {check.what}")
        lines += [f"             {one}" for one in check.details[:_MOST_SHOWN]]
        if len(check.details) > _MOST_SHOWN:
            lines.append(f"             and {len(check.details) - _MOST_SHOWN} more")
    conclusions = {
        "same": "The present tree would make the same file.",
        "differs": "The present tree would not make the same file.",
        "unknown": "Nothing that can be compared differs, but not everything can be.",
    }
    return [*lines, conclusions[_overall(checks)]]
