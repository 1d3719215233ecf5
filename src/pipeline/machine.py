"""What of a machine decides roundings: which kernels its libraries choose, and how to fix them.

Torch, MKL, oneDNN, OpenBLAS and NumPy look at the processor and choose their fastest kernels for
it. Kernels add in different orders, so equal inputs give other last bits on another processor.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

PORTABLE: Mapping[str, str] = {
    "ATEN_CPU_CAPABILITY": "default",  # torch's own kernels
    "MKL_CBWR": "COMPATIBLE",  # matrix products of torch; the only branch for AMD and Intel alike
    "ONEDNN_MAX_CPU_ISA": "SSE41",  # convolutions and recurrent layers of torch
    "OPENBLAS_CORETYPE": "Nehalem",  # matrix products of NumPy, in environments
    "OPENBLAS_NUM_THREADS": "1",  # otherwise one for each core
    "NPY_DISABLE_CPU_FEATURES": "X86_V3",  # NumPy's loops; the groups above it need this one
}
"""Environment variables that choose the same kernels on every x86-64 with AVX."""
_OTHERS = ("MKL_ENABLE_INSTRUCTIONS", "GLIBC_TUNABLES", "NPY_ENABLE_CPU_FEATURES")
_FLAGS = ("avx", "fma", "avx2", "avx512f", "avx512_bf16", "amx_tile", "asimd", "sve")


def is_portable() -> bool:
    """Return whether this process began with the variables of `PORTABLE`."""
    return all(os.environ.get(name) == value for name, value in PORTABLE.items())


def begin_again_portably() -> None:
    """Begin this process again with the variables of `PORTABLE`, unless it has them.

    Libraries read them while they are loaded, so it is too late to set them here.
    """
    if is_portable():
        return
    os.environ.update(PORTABLE)
    command = [sys.executable, *sys.orig_argv[1:]]
    if os.name == "nt":  # whose exec ends this process, so that its parent takes it for done
        sys.exit(subprocess.call(command))  # noqa: S603  # our own command line
    os.execv(sys.executable, command)  # noqa: S606  # the same process, for whoever waits for it


def facts() -> dict[str, Any]:
    """Return what decides roundings in this process, of the libraries that it has loaded."""
    # Not imported: a stage without networks does without torch.
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
    """Return the facts that decide roundings: where kernels are fixed, no processor does."""
    kept = {key: value for key, value in recorded.items() if key not in _NOT_DECISIVE}
    if recorded.get("portable"):
        kept.pop("processor", None)
    return kept | dict(recorded.get("variables", {}))


def summary(recorded: Mapping[str, Any]) -> str:
    """Return the facts in one line."""
    kernels = ", ".join(
        f"{key} {recorded[key]}" for key in sorted(recorded) if key not in _IN_FRONT
    )
    start = "portable" if recorded["portable"] else recorded["processor"]
    return f"{start}: {kernels}" if kernels else str(start)


_NOT_DECISIVE = ("portable", "variables", "system")  # of themselves
_IN_FRONT = ("portable", "processor", "variables")


def _openblas() -> dict[str, Any]:
    try:
        from threadpoolctl import threadpool_info  # type: ignore[import-untyped]  # has no stubs
    except ModuleNotFoundError:  # a part of `train`
        return {}
    libraries = [one for one in threadpool_info() if one["internal_api"] == "openblas"]
    # SciPy may have loaded one of its own; the kernel is the same.
    return {
        "OpenBLAS": ", ".join(sorted({str(one.get("architecture")) for one in libraries})),
        "OpenBLAS threads": max((one["num_threads"] for one in libraries), default=0),
    }


def processor() -> str:
    """Return its model and the vector instructions that libraries choose kernels by."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return f"{platform.machine()} {platform.processor()}".strip()
    lines = info.read_text(encoding="utf-8", errors="replace").partition("\n\n")[0].splitlines()
    of_one = {key.strip(): value.strip() for key, _, value in (one.partition(":") for one in lines)}
    flags = set(of_one.get("flags", of_one.get("Features", "")).split())
    has = [flag for flag in _FLAGS if flag in flags]
    model = [of_one[key] for key in ("model name", "cpu family", "model") if key in of_one]
    return " ".join([platform.machine(), *model, *has])
