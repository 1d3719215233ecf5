"""`pipeline onnx check`: which Unity packages load a policy, and whether it fits a behavior."""

import sys
from argparse import Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterator
from pathlib import Path

from pipeline.cli.parser import Parser, option
from pipeline.core.specs import BehaviorSpec
from pipeline.errors import ExportError, Mistakes, PipelineError, SettingsError, brief, few
from pipeline.export.layout import ModelDescription

EPILOG = """\
for example
  pipeline onnx check results/first/3DBall.onnx --env balance_ball
  pipeline onnx check *.onnx --full

Exit code 0: Unity loads every file, and every file fits the behavior; else 2. The rules follow
Unity's package; they have not been tested in Unity.
"""
_PACKAGES = {
    2: "with package 1.x and newer",
    3: "with package 2.0 and newer; an older package needs a file of its own release's trainer",
}
"""Unity packages that load a model, by the model's constant `version_number`."""
_MAX_NAMES = 10
"""Maximum number of a folder's files that an error lists."""


def add_options(parser: Parser) -> None:
    """Add the subcommand `check`."""
    text = "check which Unity packages load an ONNX policy, and whether it fits a behavior"
    command = parser.add_command("check", text, _run)
    command.formatter_class = RawDescriptionHelpFormatter
    command.epilog = EPILOG
    text = ".onnx files, or folders with one .onnx file each"
    command.add_argument("files", nargs="+", type=Path, metavar="FILE", help=text)
    compared = command.add_mutually_exclusive_group()
    option(compared, "--env NAME", "compare with a behavior of an environment")
    option(compared, "--demo FILE", "compare with the behavior of a .demo file", type=str)
    text = "the behavior to compare with; default: the .onnx file's name"
    option(command, "--behavior NAME", text)
    text = "also print version numbers, tensors, and the number of each broken rule"
    option(command, "--full", text)


def _run(arguments: Namespace) -> str:
    """Return a text about each file; before an error, print the texts about valid files."""
    if arguments.behavior and not (arguments.env or arguments.demo):
        text = "--behavior: needs --env or --demo, which has the behavior; give one of them"
        raise SettingsError(text)
    # Every file is checked, even after a mistake in an earlier file.
    texts, mistakes = [], Mistakes()
    for file in arguments.files:
        try:
            texts.append(_checked(file, arguments))
        except PipelineError as error:
            mistakes.found.append(SettingsError(str(error)))
    if mistakes.found and texts:
        sys.stdout.write("".join(f"{text}\n" for text in texts))
    mistakes.refuse()
    return "\n".join(texts)


def _checked(file: Path, arguments: Namespace) -> str:
    from pipeline.api import make_env
    from pipeline.demos.behavior_spec import spec_of

    path = only_model(file)
    said = check(path, full=arguments.full)  # a broken file is refused before an environment starts
    source = arguments.env or arguments.demo
    if source is None:
        return said
    behavior, spec, _ = spec_of(
        source, make_env, arguments.behavior, default=path.stem, renames=False
    )
    return check(path, spec, f"{behavior} of {source}", full=arguments.full)


def only_model(path: Path) -> Path:
    """Return the only `.onnx` file in a folder, which must have one; any other path unchanged."""
    if not path.is_dir():
        return path
    # Final policies are in the run's folder, files of checkpoints one folder below.
    found = sorted(path.glob("*.onnx")) or sorted(path.glob("*/*.onnx"))
    if len(found) == 1:
        return found[0]
    listed = f"has {few([*map(str, found)], _MAX_NAMES)}; name one of them"
    has = listed if found else "has no .onnx file; give the file of a run"
    raise ExportError(f"{path}: is a folder, which {has}")


def check(
    path: Path, spec: BehaviorSpec | None = None, behavior: str = "", *, full: bool = False
) -> str:
    """Return a text on the Unity packages that load a file, and on its observations and actions.

    Raises:
        ExportError: Unity does not load the file, or the file does not fit the behavior `spec`.
    """
    from pipeline.export.contract import model_findings, publishing_findings
    from pipeline.export.layout import describe, load

    model = load(path)

    # Findings are rules of Unity's package that the file breaks; each has a message and a number.
    def refuse(spec: BehaviorSpec | None, text: str, remedy: str) -> None:
        findings = model_findings(model, spec)
        if findings:
            said = "; ".join(str(found) if full else found.message for found in findings)
            raise ExportError(f"{path}: {text}: {said}; {remedy}")

    refuse(None, "Unity may not load or run this file", "export the policy again")
    if spec is not None:
        remedy = "train in this environment, or give the policy of this behavior"
        refuse(spec, f"does not fit the behavior {behavior}", remedy)
    layout = describe(model)
    loads = _PACKAGES.get(layout.version or 0, "with no known package")
    lines = [f"{path}: Unity can load this file {loads}."]
    maker = f"{model.producer_name} {model.producer_version}".strip()
    # The text is shortened, because a file from a stranger may have any text here.
    lines += [f"  made by   {brief(maker)}"] if maker else []
    lines += [f"  fits      {behavior}"] if spec is not None else []
    lines += _in_words(layout)
    lines += [f"  note      {finding.message}" for finding in publishing_findings(model, spec)]
    return "\n".join([*lines, *(_tensors(layout) if full else ())])


def _in_words(layout: ModelDescription) -> Iterator[str]:
    from pipeline.export.contract import NEWEST_VERSION

    said = {tensor: f": {brief(text)}" for tensor, text in layout.meanings.items()}
    # Each key is the number of dimensions of an observation without the batch dimension.
    kinds = {1: "vector of {}", 2: "list of up to {} x {}", 3: "image of {} x {} x {}"}
    for name, tensor in layout.inputs.items():
        sizes = tensor.shape[1:]
        if "obs" in name and len(sizes) in kinds:
            kind = kinds[len(sizes)].format(*sizes)
            yield f"  observes  {name}, {kind}{said.get(name, '')}"
    if layout.continuous_size:
        meaning = said.get("continuous_actions", "")
        plural = "" if layout.continuous_size == 1 else "s"
        yield f"  acts      {layout.continuous_size} continuous action{plural}{meaning}"
    if layout.discrete_branches:
        meaning = said.get("discrete_actions", "")
        sizes = layout.discrete_branches
        # A file for version 1.x of Unity's package has only the sum of all branch sizes.
        what = (
            f"{len(sizes)} branch{'es' * (len(sizes) > 1)} of {', '.join(map(str, sizes))} choices"
            if layout.version == NEWEST_VERSION
            else f"discrete actions, {sum(sizes)} choices over all branches"
        )
        yield f"  acts      {what}{meaning}"
    if layout.memory_size > 0:
        yield f"  remembers {layout.memory_size} numbers"


def _tensors(layout: ModelDescription) -> Iterator[str]:
    yield f"  version_number {layout.version}, opset {layout.opset}, IR version {layout.ir_version}"
    for title, tensors in (("input", layout.inputs), ("output", layout.outputs)):
        for name, info in tensors.items():
            yield f"  {title:9} {name} {info.dtype} {info.shape}"
