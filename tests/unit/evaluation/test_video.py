import json
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import gymnasium
import numpy as np
import pytest
from PIL import Image

from pipeline.core.specs import ActionTuple
from pipeline.envs.in_process import InProcessEnvironment
from pipeline.errors import SettingsError, StageError
from pipeline.evaluation import video
from pipeline.evaluation.episodes import Episode, evaluate
from pipeline.simulators import registry
from pipeline.simulators.bridges import batches
from pipeline.simulators.bridges.gymnasium_bridge import GymnasiumSimulator

from .test_episodes import MESSAGES, Played, Policy


class RandomPolicy:
    """A policy that draws actions from the seed of `reset`."""

    def __init__(self, spec):
        self.spec = spec.action_spec

    def reset(self, seed):
        self.rng = np.random.default_rng(seed)

    def act(self, steps, deterministic=False):  # noqa: ARG002  # its callers' form
        action = self.spec.random_action(len(steps), self.rng)
        if steps.action_mask is not None:
            allowed = [mask.argmin(axis=1) for mask in steps.action_mask]
            action = ActionTuple(action.continuous, np.stack(allowed, axis=1))
        return action

    def end(self, agent_ids):
        pass


def executable(folder: Path, simulator: str, **options) -> Path:
    """Write only the recipe of an executable: packing a whole executable takes seconds."""
    path = folder / "program"
    with zipfile.ZipFile(path, "w") as archive:
        described = {"simulator": simulator, "options": options}
        archive.writestr("executable.json", json.dumps(described))
    return path


def played(simulator: str, seed=7, episodes=3, **options):
    game = registry.make(simulator, seed=seed, **options)
    env = InProcessEnvironment(game)
    policies = {name: RandomPolicy(spec) for name, spec in game.behavior_specs.items()}
    try:
        return policies, evaluate(env, policies, episodes=episodes, seed=seed)
    finally:
        env.close()


def filmed(folder: Path, simulator: str, target: str, *, show="median", **options) -> Path:
    policies, episodes = played(simulator, **options)
    program = executable(folder, simulator, **options)
    path = folder / target
    films = {path: video.choose(episodes)[show]}
    video.film(program, (), policies, episodes, films, seed=7)
    return path


def n_frames(path: Path, frames_per_s: int = 20) -> int:
    """Return the number of written frames, from durations: a GIF merges equal successive frames."""
    with Image.open(path) as image:
        shown_ms = 0
        for k in range(image.n_frames):
            image.seek(k)
            shown_ms += image.info["duration"]
    return shown_ms * frames_per_s // 1000


@pytest.mark.parametrize("name", registry.NAMES)
def test_rendering_a_game_changes_no_state_and_pictures_differ_between_steps(name):
    """The compared states include the random streams."""
    watched, other = (registry.make(name, seed=5) for _ in range(2))
    for simulator in (watched, other):
        simulator.reset()
    before = watched.render(0)
    assert before.dtype == np.uint8
    assert before.shape[2] == 3
    asking = watched.reset(), other.reset()
    policies = {name: RandomPolicy(spec) for name, spec in watched.behavior_specs.items()}
    for policy in policies.values():
        policy.reset(0)
    for _ in range(8):
        actions = {b: policies[b].act(steps) for b, (steps, _) in asking[0].items() if len(steps)}
        asking = watched.step(actions), other.step(actions)
        picture = watched.render(0)
    assert repr(watched.state_dict()) == repr(other.state_dict())
    assert picture.shape == before.shape
    assert (picture != before).any()
    for simulator in (watched, other):
        simulator.close()


@pytest.mark.parametrize(
    ("simulator", "frames_per_s", "options"),
    [
        ("tag", 20, {}),
        ("gymnasium", 50, {"id": "CartPole-v1"}),  # its metadata["render_fps"]
        ("pettingzoo", 10, {"id": "mpe2.simple_spread_v3", "n_agents": 2}),
    ],
)
def test_a_video_shows_each_step_of_the_episode_and_is_reproduced_bit_for_bit(
    tmp_path, simulator, frames_per_s, options
):
    path = filmed(tmp_path, simulator, "a.gif", **options)
    repeated = filmed(tmp_path, simulator, "b.gif", **options)
    _, episodes = played(simulator, **options)
    assert path.read_bytes() == repeated.read_bytes()
    assert n_frames(path, frames_per_s) == video.choose(episodes)["median"].length


@pytest.mark.parametrize(("frames_per_s", "shown_ms"), [(4, 250), (30, 30), (50, 20), (125, 20)])
def test_gif_durations_are_rounded_and_at_least_20_ms(tmp_path, frames_per_s, shown_ms):
    frames = [np.full((8, 8, 3), 60 * k, np.uint8) for k in range(4)]
    video.write(tmp_path / "x.gif", frames, frames_per_s)
    with Image.open(tmp_path / "x.gif") as image:
        assert (image.n_frames, image.info["duration"]) == (4, shown_ms)


@pytest.mark.parametrize(("metadata", "rate"), [({"render_fps": 7}, 7), ({"render_fps": 0}, None)])
def test_the_frame_rate_of_an_environment_is_read_from_its_metadata(metadata, rate):
    env = gymnasium.make("CartPole-v1")
    env.unwrapped.metadata = metadata
    assert GymnasiumSimulator(id=[env]).render_fps == rate


def test_mujoco_environments_are_drawn_without_off_screen_rendering(tmp_path, monkeypatch):
    monkeypatch.setattr(batches, "_has_off_screen_gl", lambda: False)
    path = filmed(tmp_path, "gymnasium", "hopper.gif", id="Hopper-v5", n_agents=1)
    assert n_frames(path) > 5


def test_video_of_a_long_episode_shows_every_nth_step(tmp_path, monkeypatch):
    monkeypatch.setattr(video, "MOST_FRAMES", 16)
    path = filmed(tmp_path, "grid_world", "long.gif")
    _, episodes = played("grid_world")
    assert video.choose(episodes)["median"].length == 100
    assert n_frames(path) == 13  # steps 0, 8, ..., 96


def test_a_gif_keeps_colors_that_few_pixels_have(tmp_path):
    frames = [np.add.outer(np.arange(64), np.arange(64) + k).astype(np.uint8) for k in range(40)]
    frames = [np.repeat(frame[..., None], 3, axis=2) for frame in frames]
    frames[17][:6, :6] = (232, 163, 58)
    video.write(tmp_path / "x.gif", frames)
    with Image.open(tmp_path / "x.gif") as image:
        image.seek(17)
        pixel = np.asarray(image.convert("RGB")).astype(int)[2, 2]
    assert np.abs(pixel - (232, 163, 58)).max() < 12


def test_function_choose_takes_the_median_and_the_best_episode_of_the_first_behavior():
    episodes = [
        Episode(index=k, behavior=name, agent=k, episode_return=value, length=1, interrupted=False)
        for name, values in (("A", (1.0, 5.0, 3.0, 5.0)), ("B", (9.0,)))
        for k, value in enumerate(values)
    ]
    chosen = video.choose(episodes)
    assert (chosen["median"].index, chosen["best"].index) == (2, 1)


def test_no_video_is_written_if_the_replayed_episode_has_another_return_than_in_the_evaluation(
    tmp_path,
):
    policies, episodes = played("grid_world")
    other = [replace(episodes[0], episode_return=3.5), *episodes[1:]]
    films = {tmp_path / "x.gif": other[0]}
    with pytest.raises(
        StageError, match=r"episode 0 of GridWorld\?team=0 returned 3.5 in .* again"
    ):
        video.film(executable(tmp_path, "grid_world"), (), policies, other, films, seed=7)
    assert not (tmp_path / "x.gif").exists()


def test_error_for_a_video_of_a_unity_player_proposes_unity_recorder(tmp_path):
    (tmp_path / "player").write_text("#!/bin/sh\n")
    with pytest.raises(StageError, match=r"player: cannot be filmed: .*Unity Recorder"):
        video.check(tmp_path / "player", [tmp_path / "x.gif"])


def test_an_environment_without_rgb_rendering_is_refused():
    class Spoken:
        metadata: ClassVar = {"render_modes": ["ansi"]}

        def render(self):
            return "a board"

    class Mine(gymnasium.Env):
        """An environment without a render method."""

    with pytest.raises(SettingsError, match=r"mine: cannot be filmed: .* modes are none; 'rgb_arr"):
        batches.picture(Mine(), "mine")
    message = "chess: cannot be filmed: .* modes are ansi; 'rgb_array'"
    with pytest.raises(SettingsError, match=message):
        batches.picture(Spoken(), "chess")


def test_video_file_with_an_unknown_suffix_or_as_mp4_without_imageio_ffmpeg_is_refused(
    tmp_path, monkeypatch
):
    program = executable(tmp_path, "grid_world")
    with pytest.raises(SettingsError, match=r"x.avi: a video is a .gif or .mp4"):
        video.check(program, [tmp_path / "x.avi"])
    monkeypatch.setattr(video, "find_spec", lambda _: None)
    video.check(program, [tmp_path / "x.gif"])
    with pytest.raises(
        SettingsError, match=r"imageio-ffmpeg, .*pip install 'rl-pipeline\[video\]'"
    ):
        video.check(program, [tmp_path / "x.mp4"])


def test_equal_pictures_give_equal_mp4_bytes(tmp_path):
    pytest.importorskip("imageio_ffmpeg")
    frames = [np.full((32, 48, 3), 20 * k, np.uint8) for k in range(5)]
    for name in ("a.mp4", "b.mp4"):
        video.write(tmp_path / name, frames)
    content = (tmp_path / "a.mp4").read_bytes()
    assert content[4:8] == b"ftyp"
    assert content == (tmp_path / "b.mp4").read_bytes()


def test_video_shows_only_the_wanted_episode_of_an_agent_with_several_episodes(
    tmp_path, monkeypatch
):
    shown: dict[str, list[tuple[int, int]]] = {}

    class Stage:
        """A simulator that renders the number of the step and the agent as a single pixel."""

        def __init__(self):
            self.env = Played(Ball__0=MESSAGES)

        def render(self, agent):
            return np.array([[[self.env.at, agent]]])

    stage = Stage()
    stage.env.close = lambda: None
    monkeypatch.setattr(video, "_opened", lambda *_: stage)
    monkeypatch.setattr(video, "InProcessEnvironment", lambda simulator: simulator.env)
    monkeypatch.setattr(video, "_reduced", lambda image: image)
    monkeypatch.setattr(
        video,
        "write",
        lambda path, frames, *_: shown.update({path.name: [tuple(f[0, 0]) for f in frames]}),
    )
    played = evaluate(Played(Ball__0=MESSAGES), {"Ball": Policy()}, episodes=3, seed=1)
    wanted = {tmp_path / f"{number}.gif": played[number] for number in (1, 2)}
    video.film(tmp_path, (), {"Ball": Policy()}, played, wanted, seed=1)
    assert shown == {"1.gif": [(0, 3)], "2.gif": [(1, 3), (2, 3)]}
