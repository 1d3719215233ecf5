"""The pages of the reference that settings, commands and docstrings make.

`python docs/tools/reference.py` writes the pages of settings, commands and statistics to their
files. The page of docstrings is in no file; this hook of MkDocs adds it.
`tests/unit/test_reference.py` proves that every setting, option and public name is on a page, and
that the files are current.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import itertools
import json
import logging
import os
import re
import sys
import textwrap
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

import pipeline
from pipeline.cli.main import COMMANDS, GROUPS, parser_for
from pipeline.plugins import Group
from pipeline.settings import RunSettings
from pipeline.settings.project.claims import Claim
from pipeline.settings.project.environments import SOURCES
from pipeline.settings.project.experiments import SINKS, SinkNames
from pipeline.settings.project.params import Params
from pipeline.settings.reader import Bounds, setting_hints
from pipeline.tracking import names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

DOCS = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((\.\./[^)\s]+)\)")
_SCALARS = {int: "whole number", float: "number", bool: "true or false", str: "text", Any: "any"}
_log = logging.getLogger("mkdocs.hooks.reference")


# Settings ------------------------------------------------------------------------------------


def settings_classes(root: type) -> list[type]:
    """Return the settings classes that keys of `root` lead to, `root` first, with no base class.

    A key whose class has subclasses takes one of these, as `hyperparameters` does.
    """
    order: dict[type, None] = {}

    def visit(hint: Any) -> None:
        if isinstance(hint, type) and is_dataclass(hint) and hint not in order:
            for kind in _kinds(hint):
                order[kind] = None
                for inner in setting_hints(kind).values():
                    visit(inner)
        for inner in get_args(hint):
            visit(inner)

    visit(root)
    return list(order)


def _kinds(cls: type) -> list[type]:
    """Return the classes of ours that a value of `cls` may have: itself, or those based on it."""
    # a dataclass with slots is a copy of the class that was written, which lives on as a subclass
    below = [
        one
        for one in cls.__subclasses__()
        if one.__module__.startswith("pipeline.")
        and one is getattr(sys.modules[one.__module__], one.__name__)
    ]
    kinds = [kind for one in below for kind in _kinds(one)]
    # A base class is none of them, unless it is a source of environments itself.
    return [cls, *kinds] if not below or cls in SOURCES.values() else kinds


def meanings(cls: type) -> dict[str, str]:
    """Return the text below each field of a dataclass, those of its bases included."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0].body
        for one, following in itertools.pairwise(body):
            if isinstance(one, ast.AnnAssign) and isinstance(following, ast.Expr):
                found[one.target.id] = " ".join(following.value.value.split())
    return found


def _type(hint: Any) -> str:
    """Return in Markdown what may be written for a value of the type `hint`."""
    origin, parts = get_origin(hint), get_args(hint)
    if hint is type(None):
        return "null"
    if origin is Annotated:
        limits = [_bounds(one) for one in parts[1:] if isinstance(one, Bounds)]
        names = [f"`{name}`" for one in parts[1:] if isinstance(one, Group) for name in one.ours]
        return ", ".join(names) or " ".join([_type(parts[0]), *limits])
    if hint is SinkNames:
        return f"list of {', '.join(f'`{name}`' for name in SINKS.ours)}"
    if hint in _SCALARS:
        return _SCALARS[hint]
    if origin is Literal:
        return ", ".join(f"`{one}`" for one in parts)
    if origin is dict:
        return f"map of {_type(parts[1])}"
    if origin in (tuple, list):
        return f"list of {_type(parts[0])}"
    if parts:
        return " or ".join(map(_type, parts))
    if is_dataclass(hint) and setting_hints(hint):
        return " or ".join(f"[{one.__name__}](#{one.__name__.lower()})" for one in _kinds(hint))
    return hint.__name__


def _bounds(limits: Bounds) -> str:
    texts = {
        "≥ {}": limits.at_least,
        "> {}": limits.above,
        "≤ {}": limits.at_most,
        "divisible by {}": limits.multiple_of,
    }
    return ", ".join(text.format(value) for text, value in texts.items() if value is not None)


def _default(item: Any) -> str:
    if item.default is not MISSING:
        value = item.default
    elif item.default_factory is not MISSING:
        value = item.default_factory()
    else:
        return "required"
    if is_dataclass(value) or (isinstance(value, dict) and value):
        return "its defaults"
    if value == "":
        return "required"
    return f"`{json.dumps(value)}`"


def settings_page() -> str:
    """Return the page of every key of a trainer configuration and of params.yaml."""
    lines = [
        "# Settings",
        "",
        "Every key, as the settings classes have it. [Rules and examples](configuration.md).",
        "Typical values are those of `config/` and of published configurations; all values within "
        "the limits are allowed.",
    ]
    roots = {"Trainer configuration": RunSettings, "params.yaml": Params, "claims.yaml": Claim}
    for title, root in roots.items():
        lines += ["", f"## {title}"]
        for cls in settings_classes(root):
            lines += ["", *_class_section(cls)]
    return "\n".join(lines) + "\n"


def _class_section(cls: type) -> Iterator[str]:
    yield f"### {cls.__name__}"
    yield ""
    yield inspect.getdoc(cls) or ""
    yield ""
    yield "| Key | Value | Default | |"
    yield "|---|---|---|---|"
    texts, hints = meanings(cls), setting_hints(cls)
    for item in fields(cls):
        if item.name in hints:
            kind = _type(hints[item.name])
            text = _cell(texts.get(item.name, ""))
            if "addition" in item.metadata:
                text += " An addition to ML-Agents' format."
            yield f"| `{item.name}` | {kind} | {_default(item)} | {text} |"


def _cell(text: str) -> str:
    """Return text for a cell of a table; angle brackets would be taken for HTML."""
    parts = re.split(r"(`[^`]*`)", text.replace("|", "\\|"))
    return "".join(p if p.startswith("`") else p.replace("<", "&lt;") for p in parts)


# Commands ------------------------------------------------------------------------------------


def commands_page() -> str:
    """Return the page of every command with its usage and options."""
    lines = [
        "# Commands",
        "",
        "Every command, as `pipeline COMMAND --help` has it.",
        "All take `--debug`: detailed log, and tracebacks.",
        "",
        "| | |",
        "| --- | --- |",
    ]
    for title, commands in GROUPS.items():
        links = ", ".join(f"[`{name}`](#pipeline-{name})" for name in commands)
        lines.append(f"| {title} | {links} |")
    for name, parser in command_parsers():
        lines += ["", *_command_section(name, parser)]
    return "\n".join(lines) + "\n"


def command_parsers() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield each command, `demo import` after `demo`, with its parser."""
    for name in COMMANDS:
        yield from _with_subcommands(name, _subparsers(parser_for([name]))[name])


def _with_subcommands(
    name: str, parser: argparse.ArgumentParser
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    yield name, parser
    for word, inner in _subparsers(parser).items():
        yield from _with_subcommands(f"{name} {word}", inner)


def _subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:  # argparse has no public way to list them
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def _command_section(name: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    yield f"## pipeline {name}"
    yield ""
    yield f"{_cell(parser.description or '')}"
    yield ""
    actions = [
        one
        for one in parser._actions
        if not isinstance(one, argparse._SubParsersAction | argparse._HelpAction)
        and one.help != argparse.SUPPRESS
        and one.dest != "debug"
    ]
    if not _subparsers(parser):
        usage = re.sub(r"\s+", " ", parser.format_usage().partition("usage: ")[2]).strip()
        yield "```"
        yield from textwrap.wrap(usage, 100, subsequent_indent="    ", break_on_hyphens=False)
        yield "```"
        yield ""
    if actions:
        yield from ("| Option | |", "|---|---|")
    formatter = parser._get_formatter()
    for action in actions:
        words = _invocation(action, formatter)
        text = formatter._expand_help(action) if action.help else ""
        yield f"| `{words}` | {_cell(' '.join(text.split()))} |"
    if parser.epilog:
        yield from ("", "```text", *parser.epilog.strip("\n").splitlines(), "```")


def _invocation(action: argparse.Action, formatter: argparse.HelpFormatter) -> str:
    """Return the names of an option with its value, in the same form in all versions of Python."""
    if not action.option_strings:
        return formatter._format_action_invocation(action)
    value = formatter._format_args(action, action.dest.upper()) if action.nargs != 0 else ""
    return f"{', '.join(action.option_strings)} {value}".strip()


# Names ---------------------------------------------------------------------------------------


def api_page() -> str:
    """Return the page of every public name, which mkdocstrings fills with docstrings."""
    lines = ["# Python", "", "Every name of `import pipeline`. [Examples](python.md)."]
    for name in pipeline.__all__:
        if name != "__version__":
            one = getattr(pipeline, name)
            lines += ["", f"::: {one.__module__}.{one.__name__}"]
    return "\n".join(lines) + "\n"


def statistics_page() -> str:
    """Return the page of every number of a summary."""
    lines = [
        "# Numbers of a run",
        "",
        "What the numbers of a summary mean, in console, TensorBoard, MLflow and the other "
        "[sinks](../how-to/tracking.md#where-numbers-go). Names are ML-Agents' where it has one. "
        "Averages are over the period since the summary before (`summary_freq`).",
        "",
        "| Tag | Meaning |",
        "| --- | --- |",
        *(f"| `{tag}` | {_cell(meaning)} |" for tag, meaning in names.MEANING.items()),
    ]
    return "\n".join(lines) + "\n"


FILES: dict[str, Callable[[], str]] = {
    "reference/settings.md": settings_page,
    "reference/commands.md": commands_page,
    "reference/statistics.md": statistics_page,
}
"""Pages with a file, which other pages link to."""
PAGES: dict[str, Callable[[], str]] = {"reference/api.md": api_page}
"""Pages of the site without a file."""


# MkDocs --------------------------------------------------------------------------------------


def on_config(config: MkDocsConfig) -> None:
    """Add the pages of each folder that the menu does not name."""
    for section in config.nav[1:]:
        (pages,) = section.values()
        _complete(pages)


def _complete(pages: list[Any]) -> None:
    """Add the pages beside the first one that these do not name, and go into sections of these."""
    listed = []
    for one in pages:
        target = next(iter(one.values())) if isinstance(one, dict) else one
        if isinstance(target, list):
            _complete(target)
        else:
            listed.append(target)
    folder = DOCS / Path(listed[0]).parent
    found = sorted(path.relative_to(DOCS).as_posix() for path in folder.glob("*.md"))
    pages += [path for path in found if path not in listed]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    from mkdocs.structure.files import File

    for path, page in PAGES.items():
        files.append(File.generated(config, path, content=page()))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Name files outside docs/ in place of a link to them, and warn of one that is not there."""

    def outside(link: re.Match[str]) -> str:
        text, target = link.groups()
        path = Path(os.path.normpath(DOCS / Path(page.file.src_uri).parent / target.split("#")[0]))
        if path.is_relative_to(DOCS):
            return link[0]
        if not path.exists():
            _log.warning("%s: the link %s leads to no file", page.file.src_uri, target)
        name = path.relative_to(DOCS.parent).as_posix()
        return f"`{name}`" if text.strip("`") == name else f"{text} (`{name}`)"

    return _LINK.sub(outside, markdown)


if __name__ == "__main__":
    for path, page in FILES.items():
        (DOCS / path).write_text(page(), encoding="utf-8")
