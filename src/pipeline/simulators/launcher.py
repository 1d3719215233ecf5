"""What runs in an executable before the package does: it is `SHELL`, filled in, and an archive.

The shell script finds an interpreter that fits and replaces itself with it, so the process that was
launched is the Python process. `MAIN` is the archive's `__main__.py`. It runs twice in the life of
an executable's cache: from the archive, where it unpacks, and from the unpacked folder, at every
later start.
"""

SHELL = """\
#!/bin/sh
# {name}: an environment executable. This script finds a Python; a zip archive follows it.
check='import os, sys
if (sys.implementation.cache_tag + sys.abiflags, sys.platform, os.uname().machine) == {tag}:
    print(sys.executable)'
cache=${{PIPELINE_CACHE:-${{XDG_CACHE_HOME:-${{HOME:-/nonexistent}}/.cache}}/rl-pipeline}}
own=$cache/executables/{digest}
for candidate in "${{PIPELINE_PYTHON:-}}" "$(cat "$own.python" 2>/dev/null)" {python} \\
  /usr/local/bin/{python} /usr/bin/{python} python3 python
do
  [ -n "$candidate" ] || continue
  python=$("$candidate" -I -S -c "$check" 2>/dev/null)
  [ -z "$python" ] || break
done
if [ -z "$python" ]; then
  echo "{name}: needs C{version_text}, which was not found;" \\
    "put {python} on PATH, or set PIPELINE_PYTHON to its path." >&2
  exit 3
fi
main=$own/__main__.py
[ -f "$main" ] || main=$0
exec "$python" -I -S "$main" "$@"
exit 3
"""

MAIN = '''\
"""Unpacks this executable if that has not been done, and runs it."""

import contextlib
import fcntl
import json
import os
import shutil
import sys
import tempfile
import time
import zipfile


def cache_folder():
    own = os.environ.get("PIPELINE_CACHE")
    shared = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.abspath(os.path.join(own or os.path.join(shared, "rl-pipeline"), "executables"))


def unpacked(archive):
    """The folder with the archive's files, unpacked now if it is not there."""
    with zipfile.ZipFile(archive) as source:
        digest = source.read("DIGEST").decode()
        parent = cache_folder()
        folder = os.path.join(parent, digest)
        if os.path.exists(folder):
            return folder
        os.makedirs(parent, exist_ok=True)
        remove_abandoned(parent, "." + digest)
        temporary = tempfile.mkdtemp(dir=parent, prefix="." + digest + ".")
        descriptor = None
        try:
            with contextlib.suppress(OSError):  # a file system without locks
                descriptor = lock(temporary)
            source.extractall(temporary)
            os.rename(temporary, folder)
        except OSError:
            if not os.path.exists(folder):  # otherwise another start was faster
                raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            if descriptor is not None:
                os.close(descriptor)
    return folder


def lock(folder):
    """A descriptor that holds the system's lock of a folder; raises OSError if another has it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def remove_abandoned(parent, prefix):
    """Remove what starts that were killed while they unpacked have left; nobody holds its lock."""
    for name in os.listdir(parent):
        path = os.path.join(parent, name)
        try:
            if name.startswith(prefix) and os.path.getmtime(path) < time.time() - 1:
                descriptor = lock(path)
                shutil.rmtree(path, ignore_errors=True)
                os.close(descriptor)
        except OSError:
            pass  # it is being unpacked, or another start removed it


def run():
    folder = os.path.dirname(os.path.abspath(__file__))
    if os.path.isfile(folder):
        try:
            folder = unpacked(folder)
        except OSError as error:
            sys.stderr.write(
                "cannot unpack into %s: %s; set PIPELINE_CACHE to a folder that can be written\\n"
                % (cache_folder(), error)
            )
            return 3
    sys.path[:] = [os.path.join(folder, "lib")] + [p for p in sys.path if p != sys.path[0]]
    os.environ["MUJOCO_GL"] = "disable"
    with open(os.path.join(folder, "executable.json"), encoding="utf-8") as file:
        described = json.load(file)
    from pipeline.simulators.executable import main

    return main(described["simulator"], sys.argv[1:], described["options"])


if __name__ == "__main__":
    sys.exit(run())
'''
