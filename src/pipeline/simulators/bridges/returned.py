"""Names what a method of a third-party environment returns where its library asks for other values.

It is asked after a failure only: environments that keep the rules are not slowed down.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.errors import UnityEnvironmentException

MISUSE = (AttributeError, TypeError, ValueError)
"""What Python raises where a method returns something else."""
_ONE = ("observation", "reward", "terminated", "truncated", "info")
_BY_AGENT = ("observations", "rewards", "terminations", "truncations", "infos")


def refuse_returned(env: Any, method: str, result: Any, error: Exception, *, where: str) -> None:
    """Raise a better error if a method of an environment broke its library's rules.

    Args:
        env: the environment.
        method: `reset`, `step`, or `last` of PettingZoo's `AECEnv`.
        result: what the method returned; None if it failed.
        error: what happened then.
        where: name of the environment, for the message.

    Raises:
        UnityEnvironmentException: It did; the message says which rule.
    """
    library = "PettingZoo" if hasattr(env, "possible_agents") else "Gymnasium"
    names: tuple[str, ...] = _ONE
    if library == "PettingZoo" and method != "last":
        names = _BY_AGENT
    names = (names[0], names[-1]) if method == "reset" else names
    said = _said(names, result, error)
    if said is None:
        return
    given, asked = said
    code = getattr(getattr(getattr(env, "unwrapped", env), method, None), "__code__", None)
    line = f" ({Path(code.co_filename).name}:{code.co_firstlineno})" if code else ""
    raise UnityEnvironmentException(
        f"{where}: {method}(){line} {given}, and {library} asks for {asked}; repair the environment"
    ) from error


def _said(names: tuple[str, ...], result: Any, error: Exception) -> tuple[str, str] | None:
    """Return what a method gives and what is asked for; None if it keeps the rules."""
    n_asked = f"{len(names)} values: {', '.join(names)}"
    if result is None:
        keyword = re.search(r"reset\(\) got an unexpected keyword argument '(\w+)'", str(error))
        if keyword and keyword[1] in ("seed", "options"):
            return f"takes no '{keyword[1]}'", "reset(*, seed=None, options=None)"
        # A wrapper of the library has unpacked what the environment returned.
        last = traceback.extract_tb(error.__traceback__)[-1]
        if " to unpack (" in str(error) and "gymnasium" in Path(last.filename).parts:
            return f"returns another number of values ({error})", n_asked
        return None
    if not isinstance(result, tuple | list):
        return f"returns one {type(result).__name__}", n_asked
    if len(result) != len(names):
        return f"returns {len(result)} values", n_asked
    for name, value in zip(names, result, strict=True):
        if (asked := _asked_in_place_of(value, name)) is not None:
            text = " ".join(repr(value).split())
            text = text if len(text) <= 80 else f"{text[:77]}..."
            return f"returns {text} as {name}", asked
    return None


def _asked_in_place_of(value: Any, name: str) -> str | None:
    """Return what is asked for where a value of this name is wrong; None if it is right."""
    if name in _BY_AGENT:
        one = name.removesuffix("s")
        if not isinstance(value, Mapping):
            return "a dict with the value of each agent"
        wrong = (_asked_in_place_of(of_agent, one) for of_agent in value.values())
        asked = next((asked for asked in wrong if asked is not None), None)
        return None if asked is None else f"{asked} for each agent"
    if name == "info":
        return None if isinstance(value, Mapping) else "a dict"
    try:
        if name == "reward":
            float(value)
        elif name != "observation":
            bool(value)
    except (TypeError, ValueError):
        return "one number" if name == "reward" else "True or False"
    return None
