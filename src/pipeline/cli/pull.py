"""`pipeline pull`: download a policy with its model card from the Hugging Face Hub."""

import argparse
import shutil
from pathlib import Path, PurePosixPath

from pipeline import files
from pipeline.cli.parser import Parser, option
from pipeline.cli.push import hub
from pipeline.errors import FetchError, SettingsError

_HUB_ONLY = ".gitattributes"
"""Name of a file that the Hub adds to every repository, and that is not downloaded."""


def add_options(parser: Parser) -> None:
    """Add the options of `pipeline pull`, including the options of mlagents-load-from-hf."""
    parser.add_argument("repo", nargs="?", metavar="NAME/POLICY", help="the repository on the Hub")
    option(parser, "-o --output FOLDER", "the new folder; default: POLICY")
    option(parser, "--revision NAME", "branch, tag or commit; default: the newest")
    text = "ML-Agents' option with the same meaning as NAME/POLICY"
    option(parser, "--repo-id NAME/POLICY", text)
    option(parser, "--local-dir FOLDER", "ML-Agents' option for the parent folder of POLICY")


def run(arguments: argparse.Namespace) -> str:
    """Download the repository, and return the names of its files."""
    repo = arguments.repo or arguments.repo_id
    if repo is None:
        raise SettingsError("give the repository: `pipeline pull NAME/POLICY -o FOLDER`")
    parent = arguments.local_dir or Path()
    folder: Path = arguments.output or parent / repo.rpartition("/")[2]
    with files.whole_folder(folder) as part, hub(repo) as api:
        info = api.repo_info(repo, revision=arguments.revision)
        for sibling in info.siblings or ():
            # The repository's owner chooses the names, which become paths on this disk.
            path = PurePosixPath(sibling.rfilename)
            if path.is_absolute() or ".." in path.parts or "\\" in sibling.rfilename:
                raise FetchError(
                    f"{repo}: has the file {sibling.rfilename!r} outside the repository's folder; "
                    "nothing was downloaded"
                )
        # The commit that was checked is downloaded, because the branch may have changed since the
        # check.
        api.snapshot_download(repo, revision=info.sha, local_dir=part, ignore_patterns=_HUB_ONLY)
        # The Hub's client writes its own metadata into this folder.
        shutil.rmtree(part / ".cache", ignore_errors=True)
    names = sorted(path.name for path in folder.iterdir())
    return f"{folder}: {', '.join(names)}, of revision {info.sha}"
