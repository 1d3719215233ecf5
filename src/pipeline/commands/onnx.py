"""`pipeline onnx check`: would Unity's package load this file?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.errors import ExportError

if TYPE_CHECKING:
    from pipeline.commands.parser import Parser


def add_options(parser: Parser) -> None:
    """Add `check`."""
    text = "say whether Unity would load an ONNX policy"
    command = parser.add_command("check", text, lambda arguments: check(arguments.file))
    command.add_argument("file", type=Path, help="the .onnx file")


def check(path: Path) -> str:
    """Return what the file declares; raise ExportError where it breaks the contract."""
    from pipeline.export.layout import describe, load
    from pipeline.export.rules import model_findings, publishing_findings

    model = load(path)
    findings = model_findings(model)
    if findings:
        raise ExportError(f"{path}: " + "; ".join(map(str, findings)))
    layout = describe(model)
    lines = [f"{path}: keeps the contract (version {layout.version}, opset {layout.opset})"]
    for title, tensors in (("input", layout.inputs), ("output", layout.outputs)):
        lines += [f"  {title:7} {name} {info.dtype} {info.shape}" for name, info in tensors.items()]
    return "\n".join(
        [*lines, *(f"  note    {finding.message}" for finding in publishing_findings(model))]
    )
