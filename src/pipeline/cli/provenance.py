"""`pipeline provenance`: show what made an ONNX policy; compare it with a project or policy.

A project is a checkout of rl-pipeline, or a folder that `pipeline init` wrote.
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from pipeline import files, machine
from pipeline.cli.parser import Parser, option
from pipeline.dag import provenance, run_context, sources
from pipeline.dag.attempt import WORK, digest_of, read_map
from pipeline.dag.engines import MOST_COMMITS
from pipeline.dag.project import checkout, code_of
from pipeline.errors import ExportError, PipelineError
from pipeline.tracking.run_metadata import flattened, git, leaves

Verdict = Literal["same", "differs", "unknown"]
_MAX_DETAILS = 12
# The type of each field of a record is checked, because the policy's file may be damaged, or come
# from a stranger.
_FIELDS: dict[str, type] = {
    **dict.fromkeys(("stage", "run", "parameters_sha256", "code_sha256"), str),
    **dict.fromkeys(("parameters", "inputs", "versions", "sources"), dict),
    "seed": int,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """The comparison of a policy's input with the same input of a project or of another policy."""

    what: str
    verdict: Verdict
    details: tuple[str, ...] = ()
    """The differences, or why the comparison was not possible."""

    def lines(self, indent: str) -> list[str]:
        """Return the details as lines, up to a limit."""
        more = len(self.details) - _MAX_DETAILS
        shown = [*self.details[:_MAX_DETAILS], *([f"and {more} more"] if more > 0 else [])]
        return [indent + detail for detail in shown]


def add_options(parser: Parser) -> None:
    """Add the options of `pipeline provenance`."""
    text = "an .onnx file of the stage export or of `pipeline learn`"
    parser.add_argument("file", type=Path, help=text)
    text = (
        "the checkout or project to compare with; default: the present folder if it is one, else "
        "the project that contains the file"
    )
    option(parser, "--tree DIR", text)
    text = "compare with another file instead, and name the first possible cause of a difference"
    option(parser, "--diff OTHER", text, type=Path)
    option(parser, "--json", "print everything as JSON")


def run(arguments: argparse.Namespace) -> str:
    """Return a text on what made a policy, and whether a project would make the same policy."""
    if arguments.diff is not None:
        return _compared(arguments.diff, arguments.file)
    stages = read(arguments.file)
    root, where = _root(arguments.tree, arguments.file)
    # Checks are in the order in which causes act: code, parameters and inputs, packages.
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
    return "\n".join([*_described(arguments.file, stages, reason), *_judged(checks, where)])


def _compared(first: Path, second: Path) -> str:
    """Return a text that lists what may cause a difference between two files."""
    from pipeline.export.layout import without_metadata

    paths, histories = (first, second), (read(first), read(second))
    digests = {path: files.sha256_of(path) for path in paths}
    lines = [f"{path}\n  sha256 {digests[path]}" for path in paths]
    if digests[first] == digests[second]:
        return "\n".join([*lines, "They are the same bytes."])
    # Metadata is left out of this comparison: it has the record of how the file was made.
    same_network = without_metadata(first) == without_metadata(second)
    found = [*causes(*histories), *_machines(paths, *histories)]
    if same_network:
        lines.append("The networks are equal; only the records of how they were made differ.")
        found = found or list(_other_fields(*histories))
    elif not found:
        lines.append(
            "No recorded value differs. The remaining cause is the machine: its type of CPU "
            "decides which kernels run. results/.work/<stage>/<run>/stage.json (`machine`) or "
            "run_logs/machine.json records the machine; machines are compared if both policies are "
            "in their runs' folders."
        )
    lead = "The first difference" if same_network else "The first cause by which they may differ"
    for number, check in enumerate(found):
        lines.append(f"also: {check.what}" if number else f"{lead}: {check.what}")
        lines += check.lines("  ")
    return "\n".join(lines)


def causes(
    first: Sequence[provenance.Record], second: Sequence[provenance.Record]
) -> Iterator[Check]:
    """Yield the differences between two histories, by stage, the likeliest cause first."""
    stages = [[record["stage"] for record in history] for history in (first, second)]
    # Histories with different stages cannot be compared stage by stage.
    if stages[0] != stages[1]:
        text = f"{' -> '.join(stages[0])} in the first, {' -> '.join(stages[1])} in the second"
        yield _check("stages", [text])
        return
    for left, right in zip(first, second, strict=True):
        old, new = (dict(flattened(stage["parameters"])) for stage in (left, right))
        # The seed comes first, because another seed explains any difference of the weights.
        parts: list[tuple[str, Mapping[str, Any], Mapping[str, Any]]] = [
            ("seed", {"seed": left["seed"]}, {"seed": right["seed"]}),
            ("parameters", old, new),
            # Versions come before inputs, because another version of a simulator makes another
            # executable.
            ("versions", left["versions"], right["versions"]),
            ("inputs", _digests(left), _digests(right)),
            ("sources", left["sources"], right["sources"]),
            ("interruptions", _interruptions(left), _interruptions(right)),
        ]
        for part, mine, other in parts:
            if details := differences(mine, other):
                yield _check(f"{part} of {left['stage']}", details)


def _other_fields(
    first: Sequence[provenance.Record], second: Sequence[provenance.Record]
) -> Iterator[Check]:
    """Compare values that do not affect a network, such as names of runs and paths of inputs."""
    for left, right in zip(first, second, strict=True):
        if details := differences(dict(flattened(left)), dict(flattened(right))):
            yield _check(f"record of {left['stage']}", details)


def differences(mine: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the text `key: value, other value` for each key with different values."""
    keys = [key for key in {**mine, **other} if mine.get(key) != other.get(key)]
    return tuple(f"{key}: {_as_text(mine, key)}, {_as_text(other, key)}" for key in keys)


def _machines(
    paths: tuple[Path, Path],
    first: Sequence[provenance.Record],
    second: Sequence[provenance.Record],
) -> Iterator[Check]:
    """Compare the machines that made two files, if the runs' folders have records of both."""
    for left, right in zip(first, second, strict=False):
        mine, other = machine_of(paths[0], left), machine_of(paths[1], right)
        if not mine or not other:
            continue
        if details := sorted(differences(mine, other)):
            yield _check(f"machine of {left['stage']}", details)


def machine_of(path: Path, record: provenance.Record) -> dict[str, Any]:
    """Return facts about the machine that ran a stage, from the run's folder; {} if unknown."""
    stage, run = record["stage"], Path(record["run"])
    for folder in path.resolve().parents:
        recorded: Any
        if stage == "learn":
            recorded = read_map(folder / "run_logs/machine.json")
        # The file may come from a stranger, so a path in it must not lead out of the tree.
        elif run.is_absolute() or ".." in run.parts:
            return {}
        else:
            facts = read_map(folder / WORK / stage / run / "stage.json")
            # A later attempt may have overwritten the facts of the attempt that made this file.
            of_it = facts.get("fingerprint") == record.get("fingerprint")
            recorded = facts.get("machine", {}) if of_it else {}
        if isinstance(recorded, dict) and isinstance(recorded.get("variables"), dict):
            return machine.decisive(recorded)
    return {}


def _digests(record: provenance.Record) -> dict[str, str]:
    return {f"{kind} {entry['name']}": entry["sha256"] for kind, entry in record["inputs"].items()}


def _interruptions(record: provenance.Record) -> dict[str, Any]:
    steps = record.get("interrupted_at_steps")
    return {"not exact, at steps": steps} if steps else {}


def read(model: Path) -> list[provenance.Record]:
    """Return the records in the metadata of an ONNX file, in the order of stages.

    Raises:
        ExportError: The file has no records that can be read.
    """
    from pipeline.export.layout import load

    metadata = {prop.key: prop.value for prop in load(model).metadata_props}
    if provenance.KEY not in metadata:
        raise ExportError(
            f"{model}: has no record of what made it: another program or an earlier version wrote "
            "it; export it again from its checkpoint's run"
        )
    try:
        value = json.loads(metadata[provenance.KEY])
        is_known = value["format"] == provenance.FORMAT
        stages: list[provenance.Record] = value["stages"] if is_known else []
        readable = all(_is_record(record) for record in stages)
    # The file may come from a stranger; deeply nested JSON raises RecursionError.
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ExportError(f"{model}: its provenance cannot be read ({error})") from error
    if not readable:
        raise ExportError(f"{model}: its provenance is damaged; export it again from its run")
    if not stages:
        raise ExportError(
            f"{model}: its provenance has another format; use the version of rl-pipeline that made "
            "the file"
        )
    return stages


def _is_record(record: Any) -> bool:
    if not isinstance(record, dict):
        return False
    kinds = _FIELDS if record.get("stage") == "learn" else {**_FIELDS, "experiment": str}
    return (
        all(isinstance(record.get(key), kind) for key, kind in kinds.items())
        and isinstance(record.get("interrupted_at_steps", []), list)
        and all(_is_texts(entry, "name", "sha256") for entry in record["inputs"].values())
        and all(_is_texts(record[key]) for key in ("versions", "sources"))
    )


def _is_texts(value: Any, *needed: str) -> bool:
    return (
        isinstance(value, dict)
        and all(isinstance(text, str) for text in value.values())
        and value.keys() >= set(needed)
    )


def _root(tree: Path | None, file: Path) -> tuple[Path, str]:
    """Return the folder with which a file is compared, and the heading of the comparison."""
    for folder in (tree,) if tree else (Path.cwd(), *file.resolve().parents):
        if code_of(folder) != folder or (folder / "src/pipeline").is_dir():
            is_present = folder in (tree, Path.cwd())
            return folder, f"Compared with {'the present tree' if is_present else folder}:"
    if tree is not None:
        raise ExportError(
            f"{tree}: is neither a checkout of this repository (it has no src/pipeline) nor a "
            "project of `pipeline init` (it has no dvc.yaml)"
        )
    root = checkout()
    return root, (
        f"Compared with {root}, the source of this program, because neither this folder nor a "
        "parent of the file has a params.yaml (--tree gives another folder):"
    )


def commit_with(root: Path, blobs: Mapping[str, str]) -> tuple[str | None, str]:
    """Return the newest commit of any branch with these files (or None), and a text about it.

    `blobs` has git's id of each file's content, by the file's path in the repository.
    """
    # Only commits that changed `src` are read: every other commit has the same sources as one of
    # these commits.
    log = git(root, "log", "--all", f"-n{MOST_COMMITS}", "--format=%H %cs %s", "--", "src")
    if log is None:
        return None, "not known: there is no git repository here"
    lines = log.splitlines()
    for line in lines:
        commit = line.partition(" ")[0]
        # Files are compared by git's ids, so that no file has to be read or checked out.
        listed = git(root, "ls-tree", "-r", "--full-tree", commit, "--", "src") or ""
        # Each line has mode, type and id, then a tab and the path.
        facts = (entry.partition("\t") for entry in listed.splitlines())
        ids = {path: fact.split()[2] for fact, _, path in facts}
        if all(ids.get(path) == blob for path, blob in blobs.items()):
            return commit, f"{line} (the newest change of src with these sources)"
    if not lines:
        return None, "not known: no commit here has the folder src"
    return None, (
        f"none of the last {len(lines)} commits that changed src has these sources: they were not "
        "committed, or are in another repository"
    )


def _checks(stage: provenance.Record, root: Path) -> Iterator[Check]:
    name = stage["stage"]
    if name == "learn":
        reason = "the parameters came from the command line of `pipeline learn`, not from the tree"
        yield Check(what="parameters of learn", verdict="unknown", details=(reason,))
    else:
        yield _parameters(stage, root)
    for kind, entry in stage["inputs"].items():
        yield _input(kind, entry, root)
    if steps := stage.get("interrupted_at_steps"):
        reason = f"the run was interrupted at steps {', '.join(map(str, steps))}"
        yield _check(f"interruptions of {name}", [f"{reason}, and not resumed exactly"])


def _code(stages: Sequence[provenance.Record], root: Path) -> Check:
    """Check the code of all stages together: sources that they share are in the first record."""
    details = []
    for name, blob in (item for stage in stages for item in stage["sources"].items()):
        file = sources.src_of(code_of(root)) / name
        if not file.is_file():
            details.append(f"src/{name} is missing")
        elif sources.git_id(file) != blob:
            details.append(f"src/{name} has changed")
    return _check("code", list(dict.fromkeys(details)))


def _parameters(stage: provenance.Record, root: Path) -> Check:
    label = f"parameters of {stage['stage']}"
    try:
        run = run_context.find(root, stage["experiment"], stage["seed"])
        now = _parameters_now(stage["stage"], run)
    except PipelineError as error:
        return _check(label, [str(error)])
    # The present parameters go through JSON, as the recorded parameters did, because JSON turns
    # tuples into lists and keys into strings.
    old, new = (
        dict(flattened(json.loads(json.dumps(values)))) for values in (stage["parameters"], now)
    )
    details = [
        f"{key}: {_as_text(old, key)} then, {_as_text(new, key)} now"
        for key in sorted({*old, *new})
        if old.get(key, _ABSENT) != new.get(key, _ABSENT)
    ]
    return _check(label, details)


_ABSENT = object()


def _parameters_now(stage: str, run: run_context.Run) -> Mapping[str, Any]:
    if stage == "train":
        return provenance.train_parameters(run)
    from pipeline.dag.stages import export, pretrain

    job_of = pretrain.job_of if stage == "pretrain" else export.job_of
    return job_of(run).params


def _input(kind: str, entry: Mapping[str, str], root: Path) -> Check:
    label = f"{kind} {entry['name']}"
    path = entry.get("path")
    # The file may come from a stranger: a path in it must not lead out of the tree.
    elsewhere = path is None or Path(path).is_absolute() or ".." in Path(path).parts
    if path is None or elsewhere or not (root / path).exists():
        reason = "the record has no path" if path is None else f"{path} is not in the tree"
        return Check(what=label, verdict="unknown", details=(reason,))
    now = digest_of(root / path)
    return _check(label, [] if now == entry["sha256"] else [f"the content of {path} has changed"])


def _versions(stage: provenance.Record) -> Check:
    details = [
        f"{name} {then} then, {now} now"
        for name, then in stage["versions"].items()
        if (now := provenance.installed(name)) != then
    ]
    return _check("packages", details)


def _check(label: str, details: Sequence[str]) -> Check:
    return Check(what=label, verdict="differs" if details else "same", details=tuple(details))


def _as_text(values: Mapping[str, Any], key: str) -> str:
    return json.dumps(values[key]) if key in values else "absent"


def _overall(checks: Sequence[Check]) -> Verdict:
    verdicts = {check.verdict for check in checks}
    # The worst verdict of all checks counts.
    return min(verdicts, key=("differs", "unknown", "same").index)


def _described(model: Path, stages: Sequence[provenance.Record], commit: str) -> list[str]:
    last = stages[-1]
    packages = ", ".join(f"{name} {version}" for name, version in last["versions"].items())
    lines = [
        f"{model}",
        f"  file       sha256 {files.sha256_of(model)}",
        f"  run        {last['run']}, seed {last['seed']}",
        f"  commit     {commit}",
        f"  packages   {packages}",
    ]
    for stage in stages:
        lines.append(f"  {stage['stage']}")
        if steps := stage.get("interrupted_at_steps"):
            page = "docs/explanation/resume.md"
            lines.append(
                f"    interrupted at steps {', '.join(map(str, steps))}, not exact ({page})"
            )
        lines.append(f"    code        sha256 {stage['code_sha256']}")
        lines.append(f"    parameters  sha256 {stage['parameters_sha256']}")
        for kind, entry in stage["inputs"].items():
            lines.append(f"    {kind} {entry['name']}  sha256 {entry['sha256']}")
        values = leaves(stage["parameters"])
        lines += [f"      {key} = {json.dumps(value)}" for key, value in values]
    return lines


def _judged(checks: Sequence[Check], where: str) -> list[str]:
    lines = ["", where]
    for check in checks:
        lines += [f"  {check.verdict:8} {check.what}", *check.lines(" " * 13)]
    tree = "The present tree" if "present tree" in where else "That tree"
    conclusions = {
        "same": f"{tree} would make the same file.",
        "differs": f"{tree} would not make the same file.",
        "unknown": "No compared value differs, but not all values could be compared.",
    }
    return [*lines, conclusions[_overall(checks)]]
