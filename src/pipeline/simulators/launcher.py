"""The `__main__` of every executable: unpacks the executable if needed, and runs it.

At an executable's first start this file runs from the archive, and unpacks it into the cache; at
every later start it runs from the unpacked folder. It uses only the standard library, because other
packages can be imported only after unpacking.
"""

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
    """Return the folder of unpacked executables; `pack`'s shell script computes the same path."""
    # Unlike pathlib's `expanduser`, this does not fail without a home folder.
    shared = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111
    return Path(os.environ.get("PIPELINE_CACHE") or f"{shared}/rl-pipeline").absolute() / (
        "executables"
    )


def unpacked(archive: Path) -> Path:
    """Return the folder with the archive's files, after unpacking them if there is none.

    Raises:
        OSError: The archive cannot be unpacked.
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
            with contextlib.suppress(OSError):  # the file system may not support locks
                descriptor = _lock(temporary)
            source.extractall(temporary)  # this is safe, because `pack` wrote the archive
            temporary.rename(folder)
        except OSError:
            # Renaming a folder fails if another process has put its folder there meanwhile.
            if not folder.exists():
                raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            if descriptor is not None:
                os.close(descriptor)
    return folder


def _lock(folder: Path) -> int:
    """Return a descriptor that holds a folder's lock; raise OSError if another process has it."""
    import fcntl  # imported here, because `pack` imports this module on Windows, which has no fcntl

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _remove_abandoned(parent: Path, digest: str) -> None:
    """Remove temporary folders of killed processes: folders that no process has locked."""
    for path in parent.glob(f".{digest}*"):
        with contextlib.suppress(OSError):  # another process uses or has removed it
            # A folder that is younger than a second is kept, because it may not be locked yet.
            if path.stat().st_mtime < time.time() - 1:
                descriptor = _lock(path)
                shutil.rmtree(path, ignore_errors=True)
                os.close(descriptor)


def run() -> int:
    """Run the simulator that `executable.json` describes, and return an exit code."""
    folder = Path(__file__).absolute().parent
    if folder.is_file():
        try:
            folder = unpacked(folder)
        except OSError as error:
            sys.stderr.write(
                f"cannot unpack into {cache_folder()}: {error}; set PIPELINE_CACHE to a writable "
                "folder\n"
            )
            return 3
    # The first entry of `sys.path` is the folder or archive of this file, which has no packages.
    sys.path[:] = [str(folder / "lib"), *(path for path in sys.path if path != sys.path[0])]
    # An executable draws nothing, so MuJoCo does not have to load a graphics library.
    os.environ["MUJOCO_GL"] = "disable"
    described = json.loads((folder / "executable.json").read_text(encoding="utf-8"))
    from pipeline.simulators.executable import main

    return main(described["simulator"], sys.argv[1:], described["options"])


if __name__ == "__main__":
    sys.exit(run())
