"""`pipeline push`: upload a run with its model card, or a card's folder, to Hugging Face."""

import argparse
import contextlib
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.cli import card
from pipeline.cli.parser import Parser, option
from pipeline.errors import FetchError, PipelineError, SettingsError, one_line

_LIBRARIES = ("huggingface_hub", "httpx", "httpx2", "httpcore", "httpcore2", "requests")
"""Libraries with exceptions that mean that the Hub refused a request or could not be reached."""


def add_options(parser: Parser) -> None:
    """Add the options of `pipeline push`, including the options of mlagents-push-to-hf."""
    parser.add_argument(
        "run",
        nargs="?",
        metavar="RUN|FOLDER",
        help="<experiment>-<seed> of params.yaml, results/<run-id> of `pipeline learn`, or a "
        "folder that `pipeline card` wrote",
    )
    option(parser, "--repo-id NAME/POLICY", "the repository on the Hub", required=True)
    option(parser, "--commit-message TEXT", "message of the commit", default="Push to Hub")
    option(parser, "--license NAME", "the policy's license, for a card that this command writes")
    option(parser, "--private", "make a new repository private")
    option(parser, "--run-id TEXT", "ML-Agents' option for a title; it has no effect here")
    option(parser, "--local-dir RUN", "ML-Agents' option with the same meaning as RUN")
    text = "ML-Agents' option for the run's configuration"
    option(parser, "--configfile-name FILE", text, type=str, default="configuration.yaml")


def run(arguments: argparse.Namespace) -> str:
    """Upload the files, and return the commit's address."""
    from pipeline.export.layout import load

    source = arguments.run or arguments.local_dir
    if source is None:
        raise SettingsError("give the run to push: `pipeline push RUN --repo-id NAME/POLICY`")
    if arguments.configfile_name != "configuration.yaml":
        raise SettingsError(
            f"--configfile-name: {arguments.configfile_name} is not used here: every run has "
            "configuration.yaml; leave the option out"
        )
    # The stack keeps the temporary folder until the upload has ended.
    with contextlib.ExitStack() as stack:
        folder = Path(source)
        # Only a card's folder is uploaded whole: another folder, such as a checkout, may have
        # private files.
        policies = list(folder.glob("*.onnx"))
        if (folder / card.CARD).is_file() and policies:
            if arguments.license:
                text = f"{folder}: has a card already; give --license to `pipeline card`"
                raise SettingsError(text)
            for policy in policies:
                load(policy)  # this refuses a broken file
        else:
            run = card.find(source)
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "card"
            card.write(run, folder, licence=arguments.license)
        with hub(arguments.repo_id) as api:
            # None keeps the account's default for new repositories; False would override it.
            api.create_repo(arguments.repo_id, private=arguments.private or None, exist_ok=True)
            commit = api.upload_folder(
                repo_id=arguments.repo_id,
                folder_path=folder,
                commit_message=arguments.commit_message,
                delete_patterns="*",  # this deletes files of an earlier push
            )
        names = sorted(path.name for path in folder.iterdir())
    return f"Pushed {', '.join(names)} to {arguments.repo_id}: {commit.commit_url}"


@contextlib.contextmanager
def hub(repo_id: str) -> Iterator[Any]:
    """Yield a client of the Hub at HF_ENDPOINT; turn its errors into one line with a remedy."""
    # The variables are set before the import, which reads them.
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from huggingface_hub import HfApi

    for name in ("httpx", "httpx2", "huggingface_hub"):  # these libraries log every request
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        yield HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
    except Exception as error:
        # The Hub client's exceptions have no common base class, so they are recognized by the names
        # of their modules. A failed upload raises a plain RuntimeError, which has one of these
        # exceptions as its cause.
        modules = {type(cause).__module__.partition(".")[0] for cause in _causes(error)}
        from_library = not modules.isdisjoint(_LIBRARIES)
        if isinstance(error, PipelineError) or not (from_library or isinstance(error, OSError)):
            raise
        reason = f"{type(error).__name__}: {one_line(error).partition(' | ')[0]}"
        raise FetchError(f"{repo_id}: {reason}; {_remedy(error)}") from error


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception, and then the exceptions that caused it."""
    following: BaseException | None = error
    while following is not None:
        yield following
        following = following.__cause__ or following.__context__


def _remedy(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno is not None and error.filename is not None:
        return "check this file and its disk, and repeat the command"
    for cause in _causes(error):
        status = getattr(getattr(cause, "response", None), "status_code", None)
        if status in (401, 403, 404):  # the Hub hides private repositories from strangers
            return "log in with `hf auth login` or HF_TOKEN, and check the name and HF_ENDPOINT"
        if status is not None:
            return f"the Hub answered {status}: repeat the command later"
    return "check the connection, the name and HF_ENDPOINT, and repeat the command"
