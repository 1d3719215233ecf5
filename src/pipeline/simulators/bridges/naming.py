"""Find environments by id, and name those that are near when there is none of that id."""

from __future__ import annotations

import importlib
import importlib.util
import os
import pkgutil
import re
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from pipeline.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterable

APIS = ("auto", "parallel", "aec")
"""Which of PettingZoo's two interfaces to use; auto: parallel where the environment has it."""
_FAMILIES = (
    *("pettingzoo.atari", "pettingzoo.butterfly", "pettingzoo.classic", "pettingzoo.sisl"),
    "mpe2",
)
_MOVED = re.compile(r"(?:pettingzoo\.)?mpe\.(?=\w)")


def quiet() -> None:
    """Keep environments that draw and play sounds from opening windows and devices."""
    for name, value in (
        ("SDL_VIDEODRIVER", "dummy"),
        ("SDL_AUDIODRIVER", "dummy"),
        ("PYGAME_HIDE_SUPPORT_PROMPT", "hide"),
    ):
        os.environ.setdefault(name, value)


def behavior_name(env_id: str) -> str:
    """`CartPole-v1` of `CartPole-v1`, `ALE-Pong-v5` of `ale_py:ALE/Pong-v5`."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", env_id.rpartition(":")[2]).strip("-.") or "Environment"


def check(source: str, env_id: str) -> None:
    """Refuse an id that names no environment of `source` (`gymnasium` or `pettingzoo`).

    Raises:
        SettingsError: There is none; the message names the nearest ones.
    """
    if source == "gymnasium":
        registered(env_id)
    else:
        module_name(env_id)


def registered(env_id: str) -> str:
    """The name under which Gymnasium knows `env_id`, of which `module:` has been imported.

    Raises:
        SettingsError: The module cannot be imported, or Gymnasium knows no such environment.
    """
    quiet()
    import gymnasium

    module, _, name = env_id.rpartition(":")
    if module:
        _import(module, env_id)
    if name not in gymnasium.registry:
        raise SettingsError(
            f"Gymnasium has no environment '{env_id}'"
            f"{_near(name, gymnasium.registry)} For one of a package that is not loaded by itself "
            "write the package before it, as in 'ale_py:ALE/Pong-v5'."
        )
    return name


def module_name(env_id: str) -> str:
    """The module that `env_id` means: its path, with or without `pettingzoo.`, or `family/name-v1`.

    Raises:
        SettingsError: There is none.
    """
    wanted = re.sub(r"-v(?=\d+\Z)", "_v", env_id).replace("/", ".")
    wanted = _MOVED.sub("mpe2.", wanted)
    for name in (wanted, f"pettingzoo.{wanted}"):
        if re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", name) and _exists(name):
            return name
    raise SettingsError(
        f"PettingZoo has no environment '{env_id}'{_near(wanted, pettingzoo_ids())} An id is the "
        "path of a module with env or parallel_env, such as 'pettingzoo.classic.tictactoe_v3'."
    )


def creator(env_id: str, api: str) -> tuple[Any, str]:
    """What makes the PettingZoo environment, and the interface of what it makes.

    Raises:
        SettingsError: There is no such environment, or it lacks the interface or a dependency.
    """
    quiet()
    if api not in APIS:
        raise SettingsError(f"{env_id}: api is '{api}'; choose one of {', '.join(APIS)}.")
    module = _import(module_name(env_id), env_id)
    names = {"parallel": "parallel_env", "aec": "env"}
    for kind in names if api == "auto" else (api,):
        if callable(getattr(module, names[kind], None)):
            return getattr(module, names[kind]), kind
    missing = " or ".join(names.values()) if api == "auto" else names[api]
    raise SettingsError(f"{env_id}: the module {module.__name__} has no {missing}; choose another.")


def pettingzoo_ids() -> list[str]:
    """Modules of the environments of PettingZoo and of MPE2, as far as these are installed."""
    found: list[str] = []
    for package in _FAMILIES:
        spec = importlib.util.find_spec(package) if _exists(package) else None
        inside = pkgutil.iter_modules(spec.submodule_search_locations if spec else [])
        found += [f"{package}.{item.name}" for item in inside if re.search(r"_v\d+\Z", item.name)]
    return found


def unfit(env_id: str, error: Exception) -> SettingsError:
    """The error for an environment that could not be made."""
    reason = " ".join(str(error).split())
    if isinstance(error, ImportError) or type(error).__name__ == "DependencyNotInstalled":
        return SettingsError(
            f"{env_id}: something that it needs is not installed ({reason}); install it, and add "
            "it to constraints.txt."
        )
    return SettingsError(
        f"{env_id}: cannot be made with these keyword arguments ({type(error).__name__}: {reason});"
        " correct kwargs."
    )


def _import(module: str, env_id: str) -> Any:
    if not _exists(module):
        raise SettingsError(f"{env_id}: there is no module '{module}'; install it, or correct it.")
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise unfit(env_id, error) from error


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # a parent is missing, or cannot be imported
        return False


def _near(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x' or 'y'?`, or a full stop."""
    stem = _stem(name)
    by_stem: dict[str, list[str]] = {}
    for one in known:
        by_stem.setdefault(_stem(one), []).append(one)
    near = [
        one for key in get_close_matches(stem, by_stem, n=2, cutoff=0.7) for one in by_stem[key]
    ]
    if not near:
        return "."
    return f"; did you mean {' or '.join(repr(one) for one in near[-3:])}?"


def _stem(name: str) -> str:
    """What a name is without its version, family and case."""
    return re.sub(r"[-_]v\d+\Z", "", re.split(r"[/.]", name)[-1]).lower()
