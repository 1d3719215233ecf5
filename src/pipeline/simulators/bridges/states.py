"""The state of one copy of a third-party environment, where it can be read.

An environment has `get_state` and `set_state` (or `state_dict` and `load_state_dict`), which then
stand for all that it wraps, or is one of Gymnasium's own. Classic control and toy text have their
state in attributes, MuJoCo in its data, and Gymnasium's wrappers in counters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from pipeline.protocol.simulator import HasState, Restorable, restore, state_of

_KNOWN = (
    "gymnasium.envs.classic_control.",
    "gymnasium.envs.toy_text.",
    "gymnasium.envs.mujoco.",
    "gymnasium.wrappers.common",
)
_MOST_TEXT, _MOST_ITEMS = 1000, 1000


def copy_state(env: Any) -> dict[str, Any] | None:
    """Return an environment's state, layer by layer; None where a layer does not give it."""
    layers = []
    for layer in _layers(env):
        if isinstance(layer, HasState | Restorable):
            inner_state = state_of(layer)
            if inner_state is None:
                return None
            layers.append({"given": inner_state, **_stream(layer)})
            return {"layers": layers}
        # Only their state is known; with a guess, a resumed run would take another course.
        if not type(layer).__module__.startswith(_KNOWN):
            return None
        attributes = {name: value for name, value in vars(layer).items() if _is_plain(value)}
        layers.append({"attributes": attributes, **_stream(layer), **_physics(layer)})
    return {"layers": layers}


def restore_copy(env: Any, state: Mapping[str, Any]) -> None:
    """Restore what `copy_state` gave, in an environment that has been reset.

    Raises:
        ValueError: The state is of another environment.
    """
    for layer, saved in zip(_layers(env), state["layers"], strict=False):
        if "given" in saved:
            restore(layer, saved["given"])
        for name, value in saved.get("attributes", {}).items():
            # a JSON list may have been a tuple
            is_tuple = isinstance(getattr(layer, name, None), tuple)
            setattr(layer, name, tuple(value) if is_tuple else value)
        if "stream" in saved:
            layer.np_random.bit_generator.state = saved["stream"]
        if "physics" in saved:
            _restore_physics(layer, saved["physics"])


def _layers(env: Any) -> Iterator[Any]:
    """Yield the environment, and each environment that it wraps."""
    yield env
    while "env" in vars(env):
        env = env.env
        yield env


def _is_plain(value: Any) -> bool:
    if isinstance(value, np.ndarray | np.generic):
        return value.dtype.kind in "biuf"
    if isinstance(value, list | tuple):
        return len(value) <= _MOST_ITEMS and all(map(_is_plain, value))
    if isinstance(value, str):
        return len(value) <= _MOST_TEXT
    return value is None or isinstance(value, bool | int | float)


def _stream(layer: Any) -> dict[str, Any]:
    """Return the state of the layer's own random generator, if it has one."""
    rng = vars(layer).get("_np_random")
    return {} if rng is None else {"stream": rng.bit_generator.state}


def _physics(layer: Any) -> dict[str, Any]:
    """Return MuJoCo's state, and derived arrays, which rewards may read before a step."""
    if not hasattr(layer, "data") or not type(layer).__module__.startswith("gymnasium.envs.mujoco"):
        return {}
    import mujoco

    state_spec = int(mujoco.mjtState.mjSTATE_INTEGRATION)
    state = np.zeros(mujoco.mj_stateSize(layer.model, state_spec))
    mujoco.mj_getState(layer.model, layer.data, state, state_spec)
    # Arrays that are empty without contacts are the solver's, in memory that MuJoCo does not clear;
    # their meaningful part is computed from the state again.
    meaningful = dict(_arrays(mujoco.MjData(layer.model)))
    derived = {name: value.copy() for name, value in _arrays(layer.data) if name in meaningful}
    return {"physics": {"state": state, "derived": derived}}


def _restore_physics(layer: Any, saved: Mapping[str, Any]) -> None:
    import mujoco

    state_spec = int(mujoco.mjtState.mjSTATE_INTEGRATION)
    mujoco.mj_setState(layer.model, layer.data, saved["state"], state_spec)
    # Computes what is derived from the state, but also changes the warm start of the solver.
    mujoco.mj_forward(layer.model, layer.data)
    # So the state is set once more, and then the derived arrays as they were before.
    mujoco.mj_setState(layer.model, layer.data, saved["state"], state_spec)
    for name, value in _arrays(layer.data):
        before = saved["derived"].get(name)
        if before is not None and before.shape == value.shape:
            value[:] = before


def _arrays(data: Any) -> Iterator[tuple[str, Any]]:
    for name in dir(data):
        value = None if name.startswith("_") else getattr(data, name, None)
        if isinstance(value, np.ndarray) and value.dtype.kind in "biuf" and value.size:
            yield name, value
