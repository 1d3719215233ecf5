"""Finds environments by id, and suggests similar ids for unknown ids."""

import importlib
import importlib.util
import os
import pkgutil
import re
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from functools import partial
from typing import Any, cast

from pipeline import plugins
from pipeline.errors import SettingsError

APIS = ("auto", "parallel", "aec")
"""Values of the option `api`: an interface of PettingZoo; auto means parallel if there is one."""
# Names of the error classes for a missing package; the classes may not be installed themselves.
_MISSING = ("DependencyNotInstalled", "FailedToImport")
# Packages with a module for each environment; PettingZoo before 1.27 has no registry.
_FAMILIES = (
    *("pettingzoo.atari", "pettingzoo.butterfly", "pettingzoo.classic", "pettingzoo.sisl"),
    "mpe2",
)
# Ids of the environments that PettingZoo has moved to the package MPE2.
_MOVED = re.compile(r"(?:pettingzoo\.)?mpe\.(?=\w)")


def quiet() -> None:
    """Prevent environments with pictures and sounds from opening windows and audio devices."""
    for name, value in (
        ("SDL_VIDEODRIVER", "dummy"),
        ("SDL_AUDIODRIVER", "dummy"),
        ("PYGAME_HIDE_SUPPORT_PROMPT", "hide"),
    ):
        # pygame reads the variables once, when it is imported; values of the user are kept.
        os.environ.setdefault(name, value)


def behavior_name(env_id: str) -> str:
    """Return the behavior name of an id: `ALE-Pong-v5` for `ale_py:ALE/Pong-v5`."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", env_id.rpartition(":")[2]).strip("-.") or "Environment"


def function_of(id: str | Callable[..., Any]) -> Callable[..., Any]:
    """Return the function or class that `module:function` names; return a function unchanged.

    The module is searched in the current folder last, after all installed modules.
    """
    quiet()
    if callable(id):
        return id
    form = "module:function, as in my_env:make for my_env.py (`pipeline env list` shows every form)"
    return cast("Callable[..., Any]", plugins.named(id, form))


def need(package: str, env_id: str, extra: str = "envs") -> None:
    """Raise SettingsError with an installation command if `package` is not installed."""
    if not _exists(package):
        raise SettingsError(
            f"{env_id}: needs the package {package}, which is not installed: "
            f"pip install 'rl-pipeline[{extra}]'"
        )


def registered(env_id: str) -> str:
    """Import the module of `module:name`, and return the name in Gymnasium's registry."""
    quiet()
    need("gymnasium", env_id)
    import gymnasium

    module, _, name = env_id.rpartition(":")
    if module:
        _import(module, env_id)
    if name not in gymnasium.registry:
        raise SettingsError(
            f"Gymnasium has no environment '{env_id}'"
            f"{_near(name, gymnasium.registry)} If a package must be imported first, write the "
            "package before the id, as in 'ale_py:ALE/Pong-v5'."
        )
    return name


def full_name(env_id: str) -> str:
    """Return the full id of an environment: a module's path, or `module:family/name-v1`.

    The path may be given without `pettingzoo.`, or as PettingZoo registers it, `family/name-v1`.
    """
    need("pettingzoo", env_id)
    module, _, key = env_id.rpartition(":")
    if module:
        _import(module, env_id)
        if _makers(key):
            return env_id
    # The environments `pettingzoo.mpe` are now in the package `mpe2`.
    path = _MOVED.sub("mpe2.", re.sub(r"-v(?=\d+\Z)", "_v", env_id).replace("/", "."))
    if re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", path):
        inside = "pettingzoo." + path.removeprefix("pettingzoo.")
        for name in (path, inside):
            if _exists(name) or (name == inside and _makers(name)):
                return name
    if path.startswith("mpe2."):
        need("mpe2", env_id, "games")
    raise SettingsError(
        f"PettingZoo has no environment '{env_id}'{_near(path, pettingzoo_ids())} An id is the "
        "path of a module with env or parallel_env, such as 'pettingzoo.classic.tictactoe_v3', or "
        "'module:id' for an id that the module registers."
    )


def creator(env_id: str, api: str) -> tuple[Callable[..., Any], str]:
    """Return a function that makes a PettingZoo environment, and its interface, parallel or aec."""
    quiet()
    if api not in APIS:
        raise SettingsError(f"{env_id}: api is '{api}'; choose one of {', '.join(APIS)}.")
    name = full_name(env_id)
    # An environment that is not registered is a module with functions that make the environment.
    # Before PettingZoo 1.27 no environment is registered.
    makers = _makers(name.rpartition(":")[2])
    if not makers:
        module = _import(name, env_id)
        for kind, attribute in (("parallel", "parallel_env"), ("aec", "env")):
            if callable(function := getattr(module, attribute, None)):
                makers[kind] = function
    for kind in ("parallel", "aec") if api == "auto" else (api,):
        if kind in makers:
            return makers[kind], kind
    raise SettingsError(
        f"{env_id}: the environment has {' and '.join(makers) or 'neither env nor parallel_env'}, "
        f"but api is {api}; choose another api or environment."
    )


def keywords(
    env_id: str, kwargs: Mapping[str, Any], render_mode: str | None = None
) -> dict[str, Any]:
    """Return the keywords for making an environment: the user's `kwargs` and `render_mode`."""
    if "render_mode" in kwargs:
        raise SettingsError(f"{env_id}: render_mode cannot be set; remove it from kwargs.")
    return {**kwargs} if render_mode is None else {**kwargs, "render_mode": render_mode}


def registry_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions of PettingZoo for registered environments that cannot be imported."""
    if not _exists("pettingzoo.env_registry.exceptions"):  # the module exists since PettingZoo 1.27
        return ()
    module = importlib.import_module("pettingzoo.env_registry.exceptions")
    return (module.PettingZooRegistryError,)


def _makers(name: str) -> dict[str, Callable[..., Any]]:
    """Return the functions that make a registered environment, by interface; empty if unknown."""
    quiet()
    import pettingzoo

    family, _, rest = name.removeprefix("pettingzoo.").rpartition(".")
    key = f"{family}/{re.sub(r'_v(?=[0-9]+$)', '-v', rest)}" if family else name
    makers: dict[str, Callable[..., Any]] = {}
    for kind in ("parallel", "aec"):
        # The registries exist since PettingZoo 1.27.
        if key in getattr(pettingzoo, f"{kind}_registry", ()):
            makers[kind] = partial(pettingzoo.make, kind, key)
    return makers


def pettingzoo_ids() -> list[str]:
    """Return the ids of all installed environments of PettingZoo and MPE2."""
    import pettingzoo

    keys = {*getattr(pettingzoo, "aec_registry", ()), *getattr(pettingzoo, "parallel_registry", ())}
    ids = {"pettingzoo." + re.sub(r"-v(?=\d+\Z)", "_v", key).replace("/", ".") for key in keys}
    for package in _FAMILIES:
        spec = importlib.util.find_spec(package) if _exists(package) else None
        inside = pkgutil.iter_modules(spec.submodule_search_locations if spec else [])
        ids |= {f"{package}.{item.name}" for item in inside if re.search(r"_v\d+\Z", item.name)}
    return sorted(ids)


def unfit(env_id: str, error: Exception) -> SettingsError:
    """Return the error for an environment that could not be made."""
    reason = " ".join(str(error).split())
    if isinstance(error, ImportError) or type(error).__name__ in _MISSING:
        return SettingsError(
            f"{env_id}: a package that it needs is not installed ({reason}); install it, and add "
            "it to constraints.txt."
        )
    return SettingsError(
        f"{env_id}: cannot be made with these keyword arguments ({type(error).__name__}: {reason});"
        " correct kwargs."
    )


def _import(module: str, env_id: str) -> Any:
    if not _exists(module):
        raise SettingsError(
            f"{env_id}: there is no module '{module}'; install it, or correct the name."
        )
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise unfit(env_id, error) from error


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # a parent package is missing, or cannot be imported
        return False


def _near(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'x' or 'y'?` with the most similar names, or a full stop."""
    # Users mostly give an old version or leave out the family, so stems are compared.
    by_stem: dict[str, list[str]] = {}
    for candidate in known:
        by_stem.setdefault(_parts(candidate)[0], []).append(candidate)
    stems = get_close_matches(_parts(name)[0], by_stem, n=2, cutoff=0.7)
    near = [candidate for stem in stems for candidate in by_stem[stem]]
    if not near:
        return "."
    # If some candidates have the right family, only these are kept; likewise for the version.
    for part in (1, 2):
        near = [
            candidate for candidate in near if _parts(candidate)[part] == _parts(name)[part]
        ] or near
    return f"; did you mean {' or '.join(repr(candidate) for candidate in near[-3:])}?"


def _parts(name: str) -> tuple[str, str, str]:
    """Return an id's stem, family and version: `pong`, `ALE/`, `-v5` for `ALE/Pong-v5`."""
    last = re.split(r"[/.]", name)[-1]
    stem = re.sub(r"[-_]v\d+\Z", "", last)
    return stem.lower(), name.removesuffix(last), last[len(stem) :]
