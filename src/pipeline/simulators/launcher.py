"""The `__main__` of every executable: unpacks the executable if needed, and runs it.

At an executable's first start it runs from the archive, which it unpacks into the cache; at every
later start it runs from the unpacked folder. Until then only the standard library is there.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
import time
import zipfile
from pathlib import Path


def cache_folder() -> Path:
    """Return the folder of unpacked executables, which the shell script before them names too."""
    # Unlike pathlib's `expanduser`, this does not fail where there is no home.
    shared = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111
    return Path(os.environ.get("PIPELINE_CACHE") or f"{shared}/rl-pipeline").absolute() / (
        "executables"
    )


def unpacked(archive: Path) -> Path:
    """Return the folder with the archive's files, unpacked now if it is not there.

    Raises:
        OSError: It cannot be unpacked.
    """
    with zipfile.ZipFile(archive) as source:
        digest = source.read("DIGEST").decode()
        parent = cache_folder()
        folder = parent / digest
        if folder.exists():
            return folder
        parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(parent, digest)
        temporary = Path(tempfile.mkdtemp(dir=parent, prefix=f".{digest}."))
        descriptor = None
        try:
            with contextlib.suppress(OSError):  # a file system without locks
                descriptor = _lock(temporary)
            source.extractall(temporary)  # what `pack` has written
            temporary.rename(folder)
        except OSError:
            if not folder.exists():  # otherwise another start was faster
                raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            if descriptor is not None:
                os.close(descriptor)
    return folder


def _lock(folder: Path) -> int:
    """Return a descriptor that holds the system's lock of a folder; OSError if another has it."""
    import fcntl  # which Windows lacks, where this file is only read

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _remove_abandoned(parent: Path, digest: str) -> None:
    """Remove what killed starts have left while they unpacked: folders whose lock nobody holds."""
    for path in parent.glob(f".{digest}*"):
        with contextlib.suppress(OSError):  # it is being unpacked, or another start removed it
            if path.stat().st_mtime < time.time() - 1:
                descriptor = _lock(path)
                shutil.rmtree(path, ignore_errors=True)
                os.close(descriptor)


def run() -> int:
    """Run the simulator that is described beside this file; gives an exit code."""
    folder = Path(__file__).absolute().parent
    if folder.is_file():
        try:
            folder = unpacked(folder)
        except OSError as error:
            sys.stderr.write(
                f"cannot unpack into {cache_folder()}: {error}; set PIPELINE_CACHE to a folder "
                "that can be written\n"
            )
            return 3
    sys.path[:] = [str(folder / "lib"), *(path for path in sys.path if path != sys.path[0])]
    os.environ["MUJOCO_GL"] = "disable"
    described = json.loads((folder / "executable.json").read_text(encoding="utf-8"))
    from pipeline.simulators.executable import main

    return main(described["simulator"], sys.argv[1:], described["options"])


if __name__ == "__main__":
    sys.exit(run())
