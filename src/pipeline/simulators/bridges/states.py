"""Reads and restores the state of one copy of a third-party environment, if that is possible.

An environment either has `get_state` and `set_state` (or `state_dict` and `load_state_dict`), which
then include all environments that it wraps, or it is one of Gymnasium's own. Classic control and
toy text have their state in attributes, MuJoCo in its data, and Gymnasium's wrappers in counters.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from pipeline.core.simulator import HasState, Restorable, restore, state_of

_KNOWN = (
    "gymnasium.envs.classic_control.",
    "gymnasium.envs.toy_text.",
    "gymnasium.envs.mujoco.",
    "gymnasium.wrappers.common",
)
# Longer texts and lists are taken for constants of an environment, and are not stored.
_MAX_TEXT, _MAX_ITEMS = 1000, 1000


def copy_state(env: Any) -> dict[str, Any] | None:
    """Return the state of an environment and of each environment that it wraps.

    None if one of these states cannot be read.
    """
    layers = []
    for layer in _layers(env):
        if isinstance(layer, HasState | Restorable):
            inner_state = state_of(layer)
            if inner_state is None:
                return None
            layers.append({"given": inner_state, **_stream(layer)})
            return {"layers": layers}
        # The state of other classes is unknown; with a guessed state a resumed run would differ.
        if not type(layer).__module__.startswith(_KNOWN):
            return None
        attributes = {name: value for name, value in vars(layer).items() if _is_plain(value)}
        layers.append({"attributes": attributes, **_stream(layer), **_physics(layer)})
    return {"layers": layers}


def restore_copy(env: Any, state: Mapping[str, Any]) -> None:
    """Restore a state from `copy_state` in an environment that has been reset.

    Raises:
        ValueError: The state belongs to another environment.
    """
    # The saved layers may end early, at a layer whose own state includes all inner layers.
    for layer, saved in zip(_layers(env), state["layers"], strict=False):
        if "given" in saved:
            restore(layer, saved["given"])
        for name, value in saved.get("attributes", {}).items():
            # JSON has no tuples, so a list is restored as a tuple if the attribute is one.
            is_tuple = isinstance(getattr(layer, name, None), tuple)
            setattr(layer, name, tuple(value) if is_tuple else value)
        if "stream" in saved:
            layer.np_random.bit_generator.state = saved["stream"]
        if "physics" in saved:
            _restore_physics(layer, saved["physics"])


def _layers(env: Any) -> Iterator[Any]:
    yield env
    # `hasattr` would also find attributes that a wrapper forwards to the inner environment.
    while "env" in vars(env):
        env = env.env
        yield env


def _is_plain(value: Any) -> bool:
    if isinstance(value, np.ndarray | np.generic):
        # Truth values, integers and floats can be stored, and arrays of objects cannot.
        return value.dtype.kind in "biuf"
    if isinstance(value, list | tuple):
        return len(value) <= _MAX_ITEMS and all(map(_is_plain, value))
    if isinstance(value, str):
        return len(value) <= _MAX_TEXT
    return value is None or isinstance(value, bool | int | float)


def _stream(layer: Any) -> dict[str, Any]:
    """Return the state of the random generator of `layer`; empty if it has no generator."""
    # The property `np_random` would make a generator with a random seed if there is none.
    rng = vars(layer).get("_np_random")
    return {} if rng is None else {"stream": rng.bit_generator.state}


def _physics(layer: Any) -> dict[str, Any]:
    """Return MuJoCo's state and the arrays that MuJoCo derives from it.

    A reward may read the derived arrays before the next step computes them again.
    """
    if not hasattr(layer, "data") or not type(layer).__module__.startswith("gymnasium.envs.mujoco"):
        return {}
    import mujoco

    state_spec = int(mujoco.mjtState.mjSTATE_INTEGRATION)
    state = np.zeros(mujoco.mj_stateSize(layer.model, state_spec))
    mujoco.mj_getState(layer.model, layer.data, state, state_spec)
    # Arrays that are empty in a new `MjData` belong to the solver. MuJoCo does not clear their
    # memory, and computes their meaningful part from the state again.
    meaningful = dict(_arrays(mujoco.MjData(layer.model)))
    derived = {name: value.copy() for name, value in _arrays(layer.data) if name in meaningful}
    return {"physics": {"state": state, "derived": derived}}


def _restore_physics(layer: Any, saved: Mapping[str, Any]) -> None:
    import mujoco

    state_spec = int(mujoco.mjtState.mjSTATE_INTEGRATION)
    mujoco.mj_setState(layer.model, layer.data, saved["state"], state_spec)
    # `mj_forward` computes the derived arrays, but also changes the solver's warm start, which is a
    # part of MuJoCo's state
    # (https://mujoco.readthedocs.io/en/stable/computation/index.html#the-state).
    mujoco.mj_forward(layer.model, layer.data)
    # Therefore the state is set once more, and then the derived arrays are restored.
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
