"""Exceptions with messages for users, and functions that format messages.

The command line reports a `PipelineError` as one line without a traceback, and exits with the
class's exit code. The `Unity...` names are from ML-Agents' low-level API, so that `except` clauses
of existing code still work.
"""

from __future__ import annotations

import re
import shlex
import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path

_UNPRINTABLE = re.compile("[\0-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that move a terminal's cursor, reverse text, or cannot be printed."""
_LONGEST_NAME, _LONGEST_WORD, _LONGEST_LINE = 200, 1000, 4000
_LONG = re.compile(rf"\S{{{_LONGEST_WORD + 1},}}")


class PipelineError(Exception):
    """A mistake or failure; the message explains it and says what to do."""

    # argparse exits with this code after a mistake in the command line; other mistakes of the user
    # have the same code.
    exit_code = 2


class SettingsError(PipelineError):
    """A configuration file or an option cannot be used as written."""

    line: int | None = None
    """Line of the file, if the error is about a file."""
    about: tuple[object, str] | None = None
    """The node of the file that has the wrong value, and the message without file, line and key."""

    together: Sequence[SettingsError] = ()
    """The errors that this error combines; the message has one line for each of them."""

    @property
    def parts(self) -> list[SettingsError]:
        """The errors in `together`; a list with this error if it is a single error."""
        return list(self.together) or [self]


class Mistakes:
    """Collects errors of independent parts: use `with mistakes:` for each part, then `refuse`."""

    def __init__(self) -> None:
        self.found: list[SettingsError] = []

    def __enter__(self) -> None:
        """Begin a block; `__exit__` collects its error."""

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> bool:
        """Collect a SettingsError that ended the block; do not catch other exceptions."""
        if not isinstance(error, SettingsError):
            return False
        self.found += error.parts
        return True

    def refuse(self) -> None:
        """Raise the collected errors as one SettingsError, in the order of lines.

        A wrong value that several keys share is reported once.
        """
        first: dict[object, SettingsError] = {}
        for error in self.found:
            value, message = error.about or (error, "")
            # Nodes are compared by identity: equal values at different places are different
            # mistakes.
            first.setdefault((id(value), message), error)
        once = {str(error): error for error in first.values()}
        ordered = sorted(once.values(), key=lambda error: error.line or 0)
        if len(ordered) == 1:
            raise ordered[0]
        if ordered:
            # Python can raise only one exception, so this one has a line for each mistake.
            joint = SettingsError("\n".join(map(str, ordered)))
            joint.together = ordered
            raise joint


class DemonstrationError(PipelineError):
    """A demonstration file cannot be read, or does not fit the behavior."""


class ExportError(PipelineError):
    """A policy cannot be exported, or its ONNX file is not valid for Unity."""


class CheckpointError(PipelineError):
    """A checkpoint cannot be written, read or used."""


class TrainingError(PipelineError):
    """Training cannot continue, for example after a non-finite value."""


# A process that gets this error does not report a failure of its own, so that the other processes
# show the failure that came first.
class LearnerLostError(TrainingError):
    """Another process of the run has failed or ended."""


class FetchError(PipelineError):
    """An environment, or a repository of the Hub, cannot be fetched, checked, unpacked or built."""


class NotReadyError(PipelineError):
    """A check of `pipeline doctor` failed, or reproduced results differ from an archive's."""

    exit_code = 1


class StageError(PipelineError):
    """A stage of the DAG cannot start or finish."""


def one_line(error: BaseException) -> str:
    """Return an error's message as one line; for an OSError the file and the system's message."""
    message = str(error)
    # str(OSError) begins with `[Errno 2]`, which means nothing to users.
    if isinstance(error, OSError) and error.strerror:
        message = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, MemoryError):
        message = f"not enough memory; use smaller inputs, networks or buffers ({message})"
    lines = [line.strip() for line in re.split(r"[\r\n]", message)]
    return _cut(shown(" | ".join(filter(None, lines))), _LONGEST_LINE)


def printable(text: str, *, keep: str = "") -> str:
    r"""Return text with escapes, such as \x1b, for characters that a terminal would act upon."""
    return _UNPRINTABLE.sub(lambda found: found[0] if found[0] in keep else _escape(found), text)


def brief(value: object) -> str:
    """Return a name or a shape as printable text, truncated if it is long."""
    text = printable(str(value))
    return text if len(text) <= _LONGEST_NAME else f"{text[:_LONGEST_NAME]}..."


def few(names: Sequence[str], most: int = 4) -> str:
    """Return the first `most` names as text, followed by the number of the other names."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def shown(text: str) -> str:
    """Return text with escapes for unprintable characters, and with long words shortened."""
    escaped = printable(text, keep="\n\t")
    return _LONG.sub(lambda word: _cut(word[0], _LONGEST_WORD), escaped)


def _cut(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    # The end of the text is kept too, because it often names the remedy.
    return f"{text[: most * 3 // 4]}...({len(text)} characters)...{text[-most // 5 :]}"


def _escape(character: re.Match[str]) -> str:
    code = ord(character[0])
    # Python decodes bytes of file names that are not UTF-8 as U+DC80 to U+DCFF (PEP 383).
    byte = code - 0xDC00 if 0xDC80 <= code <= 0xDCFF else code
    return f"\\x{byte:02x}" if byte < 0x80 or byte != code else f"\\u{code:04x}"


def shell_command(*words: object) -> str:
    """Return a command, quoted for a shell."""
    return " ".join(map(_quoted, map(str, words)))


def _quoted(word: str) -> str:
    if not _UNPRINTABLE.search(word):
        return shlex.quote(word)
    # Quoting with $'...' (ANSI-C quoting of bash and zsh) can write any character.
    escaped = word.replace("\\", r"\\").replace("'", r"\'")
    return f"$'{printable(escaped)}'"


def where(error: BaseException) -> str:
    """Return an error's message and the line of the user's code that raised it, as one line."""
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    if isinstance(error, SystemExit):
        # The message of SystemExit is only the exit code, so the text names the call instead.
        text = f"it calls sys.exit({'' if error.code is None else repr(error.code)})"
    at = line_of_user(error)
    return f"{text} ({at})" if at else text


def line_of_user(error: BaseException) -> str:
    """Return `file:line` of the user's code that raised an error; empty without such a line."""
    other_folders = {Path(__file__).resolve().parent, Path(sysconfig.get_path("stdlib"))}
    # This finds the innermost line of the user's code: deeper frames are in libraries, and earlier
    # frames are in this program.
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        is_user_code = file.is_absolute() and "site-packages" not in file.parts
        if is_user_code and not other_folders.intersection(file.parents):
            return f"{file.name}:{frame.lineno}"
    return ""


class Interrupted(PipelineError):  # noqa: N818  # an interruption is no error
    """A signal ended the work after its state was saved."""

    def __init__(self, message: str, *, exit_code: int = 130) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class UnityException(PipelineError):  # noqa: N818  # the name is ML-Agents'
    """Base class of errors of an environment, or of the connection to it."""


class UnityEnvironmentException(UnityException):
    """The environment cannot be launched, used or understood."""


# ML-Agents does not have this class. It is a subclass of an ML-Agents class, so that code that
# catches ML-Agents' classes also catches this one.
class UnityProcessEndedException(UnityEnvironmentException):
    """The environment's process has ended by itself or by a signal."""


class UnityCommunicationException(UnityException):
    """The environment sent an invalid message."""


class UnityCommunicatorStoppedException(UnityException):
    """The environment ended the connection."""


class UnityObservationException(UnityException):
    """An observation does not have the shape or the encoding that it declares."""


class UnitySpecificationException(UnityException):
    """A behavior's shapes or actions are impossible, or its messages would need too much memory."""


class UnityActionException(UnityException):
    """An action does not fit the specification of its behavior."""


class UnityTimeOutException(UnityException):
    """The environment did not answer within the time-out."""


class UnitySideChannelException(UnityException):
    """A side channel is used in a way that it does not allow."""


class UnityPolicyException(UnityException):
    """A policy produced actions that cannot be sent to the environment."""


class UnityWorkerInUseException(UnityException):
    """The port that an environment's worker needs is taken."""

    def __init__(
        self, worker_id: int, port: int | None = None, *, remedy: str | None = None
    ) -> None:
        port_text = f" (port {port})" if port is not None else ""
        remedy = remedy or (
            "Close the environment that holds it, or use a different worker number or --base-port."
        )
        super().__init__(
            f"Couldn't start socket communication because worker number {worker_id}{port_text} is "
            f"still in use. {remedy}"
        )
        self.worker_id = worker_id
        self.port = port
