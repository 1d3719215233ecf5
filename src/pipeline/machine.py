"""The kernels of numerical libraries, which decide rounding, and how to choose portable ones.

Torch, MKL, oneDNN, OpenBLAS and NumPy choose the fastest kernels for the CPU. Kernels add in
different orders, so equal inputs may give other last bits on another CPU.
"""

import contextlib
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PORTABLE: Mapping[str, str] = {
    "ATEN_CPU_CAPABILITY": "default",  # this chooses torch's own kernels
    # This chooses the kernels of torch's matrix products; no other value suits both the CPUs of AMD
    # and the CPUs of Intel.
    "MKL_CBWR": "COMPATIBLE",
    # This chooses the kernels of torch's convolutions and recurrent layers.
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    # This chooses the kernels of NumPy's matrix products, which environments use.
    "OPENBLAS_CORETYPE": "Nehalem",
    "OPENBLAS_NUM_THREADS": "1",  # by default one thread for each core, which changes rounding
    # This disables NumPy's loops for AVX2 and for newer instructions.
    "NPY_DISABLE_CPU_FEATURES": "X86_V3",
}
"""Environment variables that choose the same kernels on every x86-64 CPU with AVX."""
_CGROUP_SHARE = Path("/sys/fs/cgroup/cpu.max")
_OTHERS = ("MKL_ENABLE_INSTRUCTIONS", "GLIBC_TUNABLES", "NPY_ENABLE_CPU_FEATURES")
_FLAGS = ("avx", "fma", "avx2", "avx512f", "avx512_bf16", "amx_tile", "asimd", "sve")


def is_portable() -> bool:
    """Return whether this process has the environment variables of `PORTABLE`."""
    return all(os.environ.get(name) == value for name, value in PORTABLE.items())


def restart_in_portable_mode() -> None:
    """Restart this process with the variables of `PORTABLE`: its libraries were loaded without."""
    if is_portable():
        return
    os.environ.update(PORTABLE)
    command = [sys.executable, *sys.orig_argv[1:]]
    # On Windows, exec ends this process, and the parent process would take the command as finished.
    if os.name == "nt":
        sys.exit(subprocess.call(command))  # noqa: S603  # this is our own command line
    os.execv(sys.executable, command)  # noqa: S606  # `execv` keeps the process id


def n_processors() -> int:
    """Return the number of processors that this process may use; the machine may have more."""
    may_use = hasattr(os, "sched_getaffinity")
    n_processors = len(os.sched_getaffinity(0)) if may_use else os.cpu_count() or 1
    # A container may have a share of the time of all processors, in microseconds of each period.
    with contextlib.suppress(OSError, ValueError):
        share, period = map(int, _CGROUP_SHARE.read_text().split())  # "max" is no share
        return max(min(n_processors, share // period), 1)
    return n_processors


def facts() -> dict[str, Any]:
    """Return facts about the CPU and the loaded libraries that decide this process's rounding."""
    # Torch is not imported here, because a stage without networks does not need it.
    torch = sys.modules.get("torch")
    variables = {name: os.environ[name] for name in (*PORTABLE, *_OTHERS) if name in os.environ}
    recorded: dict[str, Any] = {
        "portable": is_portable(),
        "processor": processor(),
        "variables": variables,
    }
    if torch is not None:
        recorded["torch"] = torch.backends.cpu.get_cpu_capability()
    if "numpy" in sys.modules:
        recorded |= _openblas()
    return recorded


def decisive(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recorded facts that decide rounding; in portable mode without the CPU."""
    selected = {key: value for key, value in recorded.items() if key not in _NOT_DECISIVE}
    if recorded.get("portable"):
        selected.pop("processor", None)
    return selected | dict(recorded.get("variables", {}))


def summary(recorded: Mapping[str, Any]) -> str:
    """Return the facts that `facts` recorded on a machine as one line of text."""
    kernels = ", ".join(
        f"{key} {recorded[key]}" for key in sorted(recorded) if key not in _IN_FRONT
    )
    start = "portable" if recorded["portable"] else recorded["processor"]
    return f"{start}: {kernels}" if kernels else str(start)


# The operating system does not decide rounding. Portable mode decides rounding by its variables,
# which `decisive` adds by their names.
_NOT_DECISIVE = ("portable", "variables", "system")
_IN_FRONT = ("portable", "processor", "variables")


def _openblas() -> dict[str, Any]:
    try:
        from threadpoolctl import threadpool_info  # type: ignore[import-untyped]  # has no stubs
    except ModuleNotFoundError:  # only the extra `train` installs this package
        return {}
    libraries = [library for library in threadpool_info() if library["internal_api"] == "openblas"]
    # SciPy may have loaded its own OpenBLAS, which has the same kernel; a kernel is listed once.
    return {
        "OpenBLAS": ", ".join(sorted({str(library.get("architecture")) for library in libraries})),
        "OpenBLAS threads": max((library["num_threads"] for library in libraries), default=0),
    }


def processor() -> str:
    """Return the CPU's model and the vector instructions that decide kernels."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return f"{platform.machine()} {platform.processor()}".strip()
    lines = info.read_text(encoding="utf-8", errors="replace").partition("\n\n")[0].splitlines()
    fields = {
        key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)
    }
    flags = set(fields.get("flags", fields.get("Features", "")).split())
    has = [flag for flag in _FLAGS if flag in flags]
    model = [fields[key] for key in ("model name", "cpu family", "model") if key in fields]
    return " ".join([platform.machine(), *model, *has])
