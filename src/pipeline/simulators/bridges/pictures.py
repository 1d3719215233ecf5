"""Pictures of third-party environments: their own, or a plain one of MuJoCo's bodies."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
from typing import Any

import numpy as np

from pipeline.arrays import AnyArray
from pipeline.errors import SettingsError
from pipeline.simulators.games.drawing import AMBER, BLUE, FLOOR, GRAY, Canvas

_PLANE, _SPHERE, _CAPSULE, _CYLINDER, _BOX = 0, 2, 3, 5, 6
_CORNERS = np.array(np.meshgrid((-1, 1), (-1, 1), (-1, 1))).reshape(3, -1).T
_FACES = [np.flatnonzero(_CORNERS[:, k] == side) for k in range(3) for side in (-1, 1)]


def picture(env: Any, where: str) -> AnyArray:
    """Return an environment as its render mode `rgb_array` shows it: uint8 [height, width, 3].

    MuJoCo renders without a GPU where EGL or OSMesa is installed; elsewhere its bodies are drawn.

    Raises:
        SettingsError: It gives no such picture.
    """
    inner = getattr(env, "unwrapped", env)
    if getattr(inner, "mujoco_renderer", None) is not None and not _has_off_screen_gl():
        return side_view(inner.model, inner.data)
    image = None
    # Gymnasium's and PettingZoo's `render` raises it where an environment draws nothing.
    with contextlib.suppress(NotImplementedError):
        image = env.render()
    if not isinstance(image, np.ndarray) or image.ndim != 3 or image.shape[2] != 3:
        modes = getattr(env, "metadata", {}).get("render_modes", ())
        raise SettingsError(
            f"{where}: cannot be filmed: render() gives no picture [height, width, 3]. Its render "
            f"modes are {', '.join(map(str, modes)) or 'none'}; 'rgb_array' is needed."
        )
    # Images from 0 to 1, and of truth values, would become black.
    if image.dtype.kind in "bf" and image.max(initial=0) <= 1:
        image = np.rint(image * np.float32(255))
    return image.astype(np.uint8)


@functools.cache
def _has_off_screen_gl() -> bool:
    """Return whether MuJoCo can render without a screen; choose its library for this process."""
    requested = os.environ.get("MUJOCO_GL")
    for name in (requested,) if requested else ("egl", "osmesa"):
        try:
            # Tried out: a library that can be imported may still lack a driver.
            importlib.import_module(f"mujoco.{name}").GLContext(8, 8).free()
        except Exception:  # noqa: BLE001, S112  # whatever a missing library leads to
            continue
        os.environ["MUJOCO_GL"] = name
        return True
    return False


def side_view(model: Any, data: Any) -> AnyArray:
    """Return MuJoCo's bodies from the side, or from above where all lie in one level."""
    from mujoco import MjData, mj_forward

    # Framed by the first pose, so that the picture keeps its scale through an episode.
    begin = MjData(model)
    mj_forward(model, begin)
    moving = model.geom_bodyid > 0
    start = begin.geom_xpos[moving]
    spread = start.max(axis=0) - start.min(axis=0) + 2 * model.geom_rbound[moving].max()
    axes = [0, 1] if np.ptp(start[:, 2]) < 0.1 * spread[:2].max() else [0, 2]
    half = 0.9 * float(spread.max())
    middle = (start.max(axis=0) + start.min(axis=0))[axes] / 2
    # The picture follows the first body, or runners would leave it.
    middle[0] += (data.xpos[1] - begin.xpos[1])[0]
    canvas = Canvas(middle - half, middle + half)
    # From back to front, so that what is nearer covers what is behind.
    for geom in np.argsort(-data.geom_xpos[:, 1], kind="stable").tolist():
        _draw_geom(canvas, model, data, geom, axes)
    return canvas.pixels()


def _draw_geom(canvas: Canvas, model: Any, data: Any, geom: int, axes: list[int]) -> None:
    kind, size = int(model.geom_type[geom]), model.geom_size[geom]
    place, turn = data.geom_xpos[geom], data.geom_xmat[geom].reshape(3, 3)
    color = BLUE if model.geom_bodyid[geom] > 0 else GRAY
    if kind == _PLANE:
        if axes == [0, 2]:
            far = (1e3, 1e3)
            canvas.box((-far[0], place[2] - far[1]), (far[0], place[2]), FLOOR)
    elif kind in (_CAPSULE, _CYLINDER):
        along = turn[:, 2] * size[1]
        ends = np.stack((place - along, place + along))[:, axes]
        canvas.line(ends, 2 * size[0], color)
        for end in ends:
            canvas.disc(end, size[0], color)
            canvas.disc(end, 0.4 * size[0], AMBER)
    elif kind == _BOX:
        corners = (place + (_CORNERS * size) @ turn.T)[:, axes]
        for face in _FACES:
            # In their order around the face; as they are numbered, its edges would cross.
            canvas.polygon(corners[face[[0, 1, 3, 2]]], color)
    else:
        radius = size[0] if kind == _SPHERE else model.geom_rbound[geom]
        canvas.disc(place[axes], float(radius), color)
