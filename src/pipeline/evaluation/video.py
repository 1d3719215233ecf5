"""Videos of episodes, which are replayed in this process and written as GIF or MP4.

The counted episodes have been played before, so filming cannot change them. An error is raised if
the replayed episodes differ. Only the area of the filmed agent is drawn.
"""

import io
import json
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from pipeline import files
from pipeline.core.arrays import AnyArray
from pipeline.core.simulator import Renderable
from pipeline.envs.in_process import InProcessEnvironment
from pipeline.errors import SettingsError, StageError
from pipeline.evaluation.episodes import ActingPolicy, Episode, evaluate
from pipeline.simulators import registry
from pipeline.simulators.executable import parse

FRAMES_PER_S = 20
"""Frame rate for environments without `render_fps`."""
MOST_FRAMES = 240
"""Largest number of frames in a video; longer episodes show every 2nd, 4th, ... step only."""
LONGEST_SIDE = 400
"""Largest width or height of a video in pixels; larger pictures are reduced."""
# GIFs may have 256 colors; fewer colors make smaller files.
_COLORS = 96


def check(program: Path, targets: Iterable[Path]) -> None:
    """Refuse videos that cannot be written, before any episode is played.

    Raises:
        SettingsError: A file name has another suffix, or the package for MP4 is not installed.
        StageError: `pipeline env build` has not made the executable.
    """
    for path in targets:
        if path.suffix not in (".gif", ".mp4"):
            raise SettingsError(
                f"{path}: a video is a .gif or .mp4 file; use one of these suffixes"
            )
        if path.suffix == ".mp4" and find_spec("imageio_ffmpeg") is None:
            raise SettingsError(
                f"{path}: MP4 needs the package imageio-ffmpeg, which is not installed: "
                "pip install 'rl-pipeline[video]', or write a .gif"
            )
    _recipe_of(program)


def choose(episodes: Sequence[Episode]) -> dict[str, Episode]:
    """Return the `median` and the `best` episode by return, of the first behavior in name order.

    With an even number of episodes, the median is the lower of the middle two. Of several episodes
    with the highest return, the first is the best.
    """
    # Returns of different behaviors cannot be ranked, so only one behavior is used.
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
    """Write a video of each episode in `wanted`, which maps video files to episodes.

    `played` has all counted episodes, which were played with `seed` and `deterministic`.

    Raises:
        SettingsError: The environment cannot be drawn.
        StageError: `pipeline env build` has not made the executable, or the replay differs.
    """
    # The new simulator gets the evaluation's seed, so that the replay begins in the same state.
    simulator: Any = _opened(program, args, seed)
    buffers = {path: _FrameBuffer() for path in wanted}

    def film_running(running: Mapping[str, Mapping[int, int]]) -> None:
        for path, episode in wanted.items():
            if running[episode.behavior].get(episode.agent) == episode.index:
                buffers[path].append(partial(simulator.render, episode.agent))

    # Environments of Gymnasium declare the frame rate at which they should be shown.
    frames_per_s = getattr(simulator, "render_fps", None) or FRAMES_PER_S
    env = InProcessEnvironment(simulator)
    # All episodes before the wanted episodes are replayed too, because they draw random numbers.
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
                f"{program}: no video: episode {repeat.index} of {repeat.behavior} returned "
                f"{original.episode_return:g} in {original.length} steps, but "
                f"{repeat.episode_return:g} in {repeat.length} when it was played again for the "
                "video. The environment draws random numbers that do not depend on its seed, or "
                "the executable was built with other versions: build it again, or leave the video "
                "out"
            )
    for path, buffer in buffers.items():
        write(path, buffer.frames, frames_per_s)


def _recipe_of(program: Path) -> tuple[str, dict[str, Any]]:
    """Return name and options of the simulator in an executable of `pipeline env build`."""
    try:
        with zipfile.ZipFile(program) as archive:
            # An executable is a zip archive that contains its recipe.
            described = json.loads(archive.read("executable.json"))
        return described["simulator"], dict(described["options"])
    except (OSError, zipfile.BadZipFile, ValueError, KeyError) as error:
        raise StageError(
            f"{program}: cannot be filmed: only executables of `pipeline env build` can be drawn "
            "here. A Unity player shows itself: load the exported policy in the Unity Editor and "
            "record it there (Unity Recorder)"
        ) from error


def _opened(program: Path, args: Sequence[str], seed: int) -> Renderable:
    """Return a simulator in this process that equals the executable's and can draw pictures."""
    name, options = _recipe_of(program)
    entry = registry.entry(name)
    if "render_mode" in entry.parameters:
        options["render_mode"] = "rgb_array"
    # As in the executable, the arguments override the options in the archive.
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
    """Pictures of an episode's steps; for long episodes only of every 2nd, 4th, ... step."""

    def __init__(self) -> None:
        self.frames: list[AnyArray] = []
        self._stride, self._n_seen = 1, 0

    def append(self, render: Callable[[], AnyArray]) -> None:
        if self._n_seen % self._stride == 0:
            if len(self.frames) == MOST_FRAMES:
                # Every second picture is deleted, so that the pictures stay evenly spaced in time.
                del self.frames[1::2]
                self._stride *= 2
            if self._n_seen % self._stride == 0:
                self.frames.append(_reduced(render()))
        self._n_seen += 1


def _reduced(image: AnyArray) -> AnyArray:
    """Return a picture with sides of at most `LONGEST_SIDE` and even numbers of pixels."""
    from PIL import Image

    height, width = image.shape[:2]
    scale = min(1.0, LONGEST_SIDE / max(height, width))
    # H.264 stores colors at half the resolution (4:2:0), so sides must be even.
    size = [max(2, 2 * round(scale * side / 2)) for side in (width, height)]
    if [width, height] == size:
        return image
    return np.asarray(Image.fromarray(image).resize((size[0], size[1]), Image.Resampling.BOX))


def write(path: Path, frames: Sequence[AnyArray], frames_per_s: float = FRAMES_PER_S) -> None:
    """Write pictures as GIF or MP4, atomically; equal pictures give equal bytes.

    Args:
        path: file with the suffix `.gif` or `.mp4`.
        frames: at least one picture, uint8 [height, width, 3], all of one size.
        frames_per_s: frames per second; at most 50 for a GIF, which counts in hundredths of a
            second.
    """
    if path.suffix == ".gif":
        files.write_whole(path, _gif(frames, frames_per_s))
    else:
        # ffmpeg writes into a file itself, so it gets a temporary file.
        with files.whole(path) as temporary:
            _write_mp4(temporary, frames, frames_per_s)


def _gif(frames: Sequence[AnyArray], frames_per_s: float) -> bytes:
    from PIL import Image

    # All pictures share a palette, because with different palettes every picture would be stored in
    # full. The method MAXCOVERAGE keeps colors of few pixels.
    all_frames = Image.fromarray(np.concatenate(frames))
    palette = all_frames.quantize(_COLORS, method=Image.Quantize.MAXCOVERAGE)
    drawn = [
        Image.fromarray(frame).quantize(palette=palette, dither=Image.Dither.NONE)
        for frame in frames
    ]
    # Browsers show pictures with a duration below 20 ms for 100 ms.
    buffer, shown_ms = io.BytesIO(), max(20, 10 * round(100 / frames_per_s))
    drawn[0].save(buffer, "GIF", save_all=True, append_images=drawn[1:], duration=shown_ms, loop=0)
    return buffer.getvalue()


def _write_mp4(path: Path, frames: Sequence[AnyArray], frames_per_s: float) -> None:
    imageio_ffmpeg = import_module("imageio_ffmpeg")  # this package is optional and has no stubs
    height, width = frames[0].shape[:2]
    # These options leave date and version out of the file.
    exact = "-map_metadata -1 -fflags +bitexact -flags:v +bitexact -threads 1"
    writer = imageio_ffmpeg.write_frames(
        str(path),
        (width, height),
        fps=frames_per_s,
        codec="libx264",
        # With the default, 16, frames would be scaled to multiples of 16.
        macro_block_size=2,
        output_params=[*exact.split(), "-movflags", "+faststart", "-f", "mp4"],
    )
    # The first `send` starts the generator, which then takes frames.
    writer.send(None)
    try:
        for frame in frames:
            writer.send(np.ascontiguousarray(frame))
    finally:
        writer.close()
