"""Film episodes: play them again where they can be drawn, and write the pictures as GIF or MP4.

The counted episodes have been played before, so filming cannot change them. The replay must give
the same episodes, which is checked. Only the area of the filmed agent is drawn.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline import files
from pipeline.envs.in_process import InProcessEnvironment
from pipeline.errors import SettingsError, StageError
from pipeline.evaluation.episodes import ActingPolicy, Episode, evaluate
from pipeline.protocol.simulator import Renderable
from pipeline.simulators import registry
from pipeline.simulators.executable import parse

if TYPE_CHECKING:
    from pipeline.arrays import AnyArray

FRAMES_PER_S = 20
"""Of environments that do not say theirs."""
MOST_FRAMES = 240
"""A longer episode is shown by every second step, or every fourth, and so on."""
LONGEST_SIDE = 400
"""Pixels; larger pictures are reduced."""
_COLORS = 96


def check(program: Path, targets: Iterable[Path]) -> None:
    """Refuse videos that could not be written, before any episode is played.

    Raises:
        SettingsError: A name has another ending, or the package for MP4 is not installed.
        StageError: The executable is not ours.
    """
    for path in targets:
        if path.suffix not in (".gif", ".mp4"):
            raise SettingsError(f"{path}: a video is a .gif or an .mp4; name it so")
        if path.suffix == ".mp4" and find_spec("imageio_ffmpeg") is None:
            raise SettingsError(
                f"{path}: MP4 needs the package imageio-ffmpeg, which is not installed: "
                "pip install 'rl-pipeline[video]', or write a .gif"
            )
    _recipe_of(program)


def choose(episodes: Sequence[Episode]) -> dict[str, Episode]:
    """Return the `median` and the `best` episode by return, of the first behavior by name.

    With an even number the median is the lower of the middle two; of equal returns the first
    counts as the best.
    """
    first = min(episode.behavior for episode in episodes)
    ranked = sorted(
        (episode for episode in episodes if episode.behavior == first),
        key=lambda episode: (episode.episode_return, -episode.index),
    )
    return {"median": ranked[(len(ranked) - 1) // 2], "best": ranked[-1]}


def film(
    program: Path,
    args: Sequence[str],
    policies: Mapping[str, ActingPolicy],
    played: Sequence[Episode],
    wanted: Mapping[Path, Episode],
    *,
    seed: int,
    deterministic: bool = True,
) -> None:
    """Write a video of each episode in `wanted` to the file that is its key.

    `played` are all counted episodes; they were played with `seed` and `deterministic`.

    Raises:
        SettingsError: The environment cannot be drawn.
        StageError: The executable is not ours, or the replay gives other episodes.
    """
    # Opened anew with the same seed: filming must begin from the same state as the counted
    # episodes.
    simulator: Any = _opened(program, args, seed)
    buffers = {path: _FrameBuffer() for path in wanted}

    def film_running(running: Mapping[str, Mapping[int, int]]) -> None:
        for path, episode in wanted.items():
            if running[episode.behavior].get(episode.agent) == episode.index:
                buffers[path].append(partial(simulator.render, episode.agent))

    frames_per_s = getattr(simulator, "render_fps", None) or FRAMES_PER_S
    env = InProcessEnvironment(simulator)
    # All episodes before the wanted ones are played too, since they use the same random numbers.
    n_episodes = 1 + max(episode.index for episode in wanted.values())
    try:
        replayed = evaluate(
            env,
            policies,
            episodes=n_episodes,
            seed=seed,
            deterministic=deterministic,
            on_running=film_running,
        )
    finally:
        env.close()
    for repeat, original in zip(replayed, (e for e in played if e.index < n_episodes), strict=True):
        if repeat != original:
            raise StageError(
                f"{program}: no video: episode {repeat.index} of {repeat.behavior} came to "
                f"{original.episode_return:g} in {original.length} steps, and to "
                f"{repeat.episode_return:g} in {repeat.length} when it was played again to be "
                "filmed. The environment draws "
                "random numbers that its seed does not reach, or the executable was built with "
                "other versions: build it again, or do without a video"
            )
    for path, buffer in buffers.items():
        write(path, buffer.frames, frames_per_s)


def _recipe_of(program: Path) -> tuple[str, dict[str, Any]]:
    """Return the name and the options of the simulator in an executable of ours."""
    try:
        with zipfile.ZipFile(program) as archive:
            described = json.loads(archive.read("executable.json"))
        return described["simulator"], dict(described["options"])
    except (OSError, zipfile.BadZipFile, ValueError, KeyError) as error:
        raise StageError(
            f"{program}: cannot be filmed: only executables of `pipeline env build` can be drawn "
            "here. A Unity player shows itself: load the exported policy in the Unity Editor and "
            "record it there (Unity Recorder)"
        ) from error


def _opened(program: Path, args: Sequence[str], seed: int) -> Renderable:
    """Return the simulator in an executable of ours, in this process and ready to draw."""
    name, options = _recipe_of(program)
    entry = registry.entry(name)
    if "render_mode" in entry.parameters:
        options["render_mode"] = "rgb_array"
    # Arguments win over what was packed, as they do in the executable.
    n_agents = parse(args).n_agents or options.get("n_agents")
    simulator = registry.make(name, seed=seed, **options | {"n_agents": n_agents})
    if not isinstance(simulator, Renderable):
        simulator.close()
        raise SettingsError(
            f"{options.get('id', name)}: cannot be filmed: its class {type(simulator).__name__} "
            "has no method render(agent), which returns a picture as uint8 [height, width, 3]"
        )
    return simulator


class _FrameBuffer:
    """Pictures of an episode: all, or for a long episode every 2nd, 4th, 8th, ..."""

    def __init__(self) -> None:
        self.frames: list[AnyArray] = []
        self._stride, self._n_seen = 1, 0

    def append(self, render: Callable[[], AnyArray]) -> None:
        """Keep the picture of this step if its number fits the stride."""
        if self._n_seen % self._stride == 0:
            if len(self.frames) == MOST_FRAMES:
                # Every second picture goes, so that the distances between pictures stay equal.
                del self.frames[1::2]
                self._stride *= 2
            if self._n_seen % self._stride == 0:
                self.frames.append(_reduced(render()))
        self._n_seen += 1


def _reduced(image: AnyArray) -> AnyArray:
    """Return a picture with even sides, the longest at most `LONGEST_SIDE`."""
    from PIL import Image

    height, width = image.shape[:2]
    scale = min(1.0, LONGEST_SIDE / max(height, width))
    # H.264 halves the resolution of colors and so needs even sides.
    size = [max(2, 2 * round(scale * side / 2)) for side in (width, height)]
    if [width, height] == size:
        return image
    return np.asarray(Image.fromarray(image).resize((size[0], size[1]), Image.Resampling.BOX))


def write(path: Path, frames: Sequence[AnyArray], frames_per_s: float = FRAMES_PER_S) -> None:
    """Write pictures as a GIF or MP4, whole or not at all; equal pictures give equal bytes.

    Args:
        path: ends in `.gif` or `.mp4`.
        frames: uint8 [height, width, 3], all of one size, at least one.
        frames_per_s: at most 50 of a GIF, which counts in hundredths of a second.
    """
    if path.suffix == ".gif":
        files.write_whole(path, _gif(frames, frames_per_s))
    else:
        with files.whole(path) as temporary:
            _write_mp4(temporary, frames, frames_per_s)


def _gif(frames: Sequence[AnyArray], frames_per_s: float) -> bytes:
    from PIL import Image

    # One palette for all: with a palette each, every picture would be stored whole. This method
    # keeps colors that few pixels have.
    all_frames = Image.fromarray(np.concatenate(frames))
    palette = all_frames.quantize(_COLORS, method=Image.Quantize.MAXCOVERAGE)
    drawn = [
        Image.fromarray(frame).quantize(palette=palette, dither=Image.Dither.NONE)
        for frame in frames
    ]
    # Browsers show pictures of less than 20 ms for 100 ms.
    buffer, shown_ms = io.BytesIO(), max(20, 10 * round(100 / frames_per_s))
    drawn[0].save(buffer, "GIF", save_all=True, append_images=drawn[1:], duration=shown_ms, loop=0)
    return buffer.getvalue()


def _write_mp4(path: Path, frames: Sequence[AnyArray], frames_per_s: float) -> None:
    imageio_ffmpeg = import_module("imageio_ffmpeg")  # without stubs, and not always installed
    height, width = frames[0].shape[:2]
    # no date, no version
    exact = "-map_metadata -1 -fflags +bitexact -flags:v +bitexact -threads 1"
    writer = imageio_ffmpeg.write_frames(
        str(path),
        (width, height),
        fps=frames_per_s,
        codec="libx264",
        # 16 by default, to which frames would be stretched.
        macro_block_size=2,
        output_params=[*exact.split(), "-movflags", "+faststart", "-f", "mp4"],
    )
    # A generator, which runs to its first `yield` before it takes a frame.
    writer.send(None)
    try:
        for frame in frames:
            writer.send(np.ascontiguousarray(frame))
    finally:
        writer.close()
