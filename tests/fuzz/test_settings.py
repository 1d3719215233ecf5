"""Changed settings files: trainer configurations, curricula, samplers, params.yaml, manifests."""

import json
from pathlib import Path
from typing import Any

from every_block import FILE as EVERY_BLOCK
from fuzzing.frame import command, fuzz
from hypothesis import strategies as st
from unit.settings.legacy.test_flat_files import PPO, SAC

from pipeline.settings.project.params import load_params
from pipeline.settings.project.plan import write_plan

from .mutations import NAMES, mutated

_ROOT = Path(__file__).resolve().parents[2]

_SECTIONS = """\
behaviors:
  Wall: {trainer_type: ppo, max_steps: 5.0e6, hyperparameters: {learning_rate_schedule: linear}}
parameter_randomization:
  resampling-interval: 5000
  mass: {sampler-type: uniform, min_value: 0.5, max_value: 10}
  scale: {sampler-type: multirange_uniform, intervals: [[1, 2], [4, 8]]}
curriculum:
  Wall: {measure: progress, thresholds: [0.1, 0.3], min_lesson_length: 100,
    signal_smoothing: true, parameters: {height: [1.5, 2.0, 4.0]}}
"""
_CURRICULUM = {
    "measure": "progress",
    "thresholds": [0.1, 0.3],
    "min_lesson_length": 100,
    "signal_smoothing": True,
    "parameters": {"height": [0.0, 4.0, 6.0], "gap": [1, 2, 3]},
}
_SAMPLER = """\
resampling-interval: 5000
mass: {sampler-type: uniform, min_value: 0.5, max_value: 10}
gravity: {sampler-type: gaussian, mean: 0, st_dev: .3}
"""
_MANIFEST = """\
environments:
  - Basic:
      expected_reward: 0.93
      description: Reach the goal.
      linux_url: file:///nowhere/basic.zip
      win_sha256: 00000000000000000000000000000000000000000000000000000000000000ff
      additional_args: [--a]
"""
# Settings that are neither in params.yaml nor in the tests' projects.
_OTHERS = """\
environments:
  cart: {source: gymnasium, id: CartPole-v1, copies: 4, kwargs: {sutton_barto_reward: true}}
  tag: {source: pettingzoo, id: mpe2/simple_tag_v3, teams: {a: 0, b: 1}, groups: behavior}
experiments:
  plain: {environment: cart, trainer: config/ppo/CartPole.yaml, overrides: {}, seeds: [1],
    stages: [train, export, evaluate], evaluation: {episodes: 4, seed: 10000}}
sweeps:
  searched: {experiment: plain, method: random, runs: 3, seed: 5, seeds: [1],
    parameters: {behaviors.CartPole-v1.hyperparameters.beta: {min: 1e-4, max: 1e-2, scale: log}}}
"""
_CONFIGS = sorted(path.read_text() for path in (_ROOT / "config").rglob("*.yaml"))
_SCALARS = st.one_of(
    st.sampled_from(
        ("", "~", "true", "yes", "0", "-1", "0.5", "1e400", "-1e400", ".nan", ".inf", "0x10", "3.")
    ),
    st.sampled_from(
        ("9" * 400, "9" * 5000, "1e-999", "0o17", "0o8", "1_000", "010", "12:30", "2020-01-01")
    ),
    st.sampled_from(
        ("[]", "{}", "[[1]]", "{a: {}}", "'", '"\\ud800"', '"\\0"', "!!python/name:os.system x")
    ),
    st.sampled_from(("1000000000", "http://[", "file://\\udc80", "[1, 2, 3, 4, 5, 6, 7, 8, 9]")),
    st.sampled_from(("!!int 3", "*a", "&a 1", "&a {b: *a}", "|", ">-", "? x", "<<", "@", "`", "%")),
    st.sampled_from(("[" * 300, "{a: " * 300, "[" * 30 + "]" * 30, '"' + "x" * 5000 + '"')),
    st.sampled_from(("ppo", "sac", "linear", "constant", "uniform", "a.demo", "../up", "file:///")),
    st.integers().map(str),
    st.floats().map(repr),
    NAMES.map(json.dumps),
    NAMES,
)
_LINES = st.one_of(
    st.sampled_from(
        ("---", "...", "%YAML 1.2", "%TAG ! tag:x,2000:", "<<: *a", "<<: {a: 1}", "<<: 3", "? [a]")
    ),
    st.sampled_from(("a: &a [1]", "b: [*a, *a]", "\t", "# x", "- a", "- - - a", ": x", "? ", "{")),
    st.builds("{}: {}".format, NAMES, _SCALARS),
)
_ENCODINGS = st.sampled_from(
    (*("utf-8",) * 8, "utf-8-sig", "utf-16", "utf-16-le", "utf-32", "latin-1", "cp1252")
)


@st.composite
def _spoiled(draw: Any, texts: st.SearchStrategy[str]) -> bytes:
    """Return a text with some lines and values changed, perhaps in another encoding or damaged."""
    lines = draw(texts).splitlines()
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, max(0, len(lines) - 1)))
        kind = draw(st.integers(0, 7))
        line = lines[at] if lines else ""
        if kind <= 2:
            key, colon, _ = line.partition(": ")
            lines[at : at + 1] = [f"{key}: {draw(_SCALARS)}" if colon else draw(_LINES)]
        elif kind == 3:
            parts = line.split(", ")
            parts[draw(st.integers(0, len(parts) - 1))] = f"{draw(NAMES)}: {draw(_SCALARS)}"
            lines[at : at + 1] = [", ".join(parts)]
        elif kind == 4:
            lines.insert(at, " " * draw(st.integers(0, 8)) + draw(_LINES))
        elif kind == 5:
            del lines[at : at + 1]
        elif kind == 6:
            lines[at : at + 1] = [line, line]
        else:
            lines[at : at + 1] = [" " * draw(st.integers(0, 6)) + line.strip()]
    text = draw(st.sampled_from(("\n", "\n", "\r\n", "\r"))).join(lines) + "\n"
    data = text.encode(draw(_ENCODINGS), errors="replace")
    return draw(mutated(st.just(data), most=1)) if draw(st.integers(0, 3)) == 0 else data


def _values(draw: Any) -> Any:
    scalars = st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), NAMES, st.sampled_from((0.5, 3, 10))
    )
    return draw(st.recursive(scalars, lambda s: st.lists(s, max_size=3), max_leaves=4))


@st.composite
def _curricula(draw: Any) -> bytes:
    """Return a curriculum with some fields changed, as JSON with NaN as Python writes it."""
    value: Any = dict(_CURRICULUM)
    for _ in range(draw(st.integers(0, 2))):
        key = draw(st.sampled_from((*_CURRICULUM, "x")))
        value[key] = _values(draw)
    if draw(st.integers(0, 3)) == 0:
        value = {draw(st.sampled_from(("Wall", "Walker", ""))): value}
    if draw(st.booleans()):
        value["parameters"] = {draw(NAMES): _values(draw)}
    data = json.dumps(value, indent=draw(st.sampled_from((None, 2, "\t")))).encode()
    return draw(mutated(st.just(data), most=2)) if draw(st.booleans()) else data


_TRAINERS = _spoiled(st.sampled_from([EVERY_BLOCK, PPO, SAC, _SECTIONS, *_CONFIGS]))
_SAMPLERS = _spoiled(st.just(_SAMPLER))


@fuzz(_TRAINERS, examples=120)
def test_changed_trainer_configurations_are_read_or_refused(data: bytes, folder: Path) -> object:
    (folder / "config.yaml").write_bytes(data)
    return command("config", "check", "config.yaml")


@fuzz(_TRAINERS, examples=60)
def test_upgraded_configuration_is_complete_and_valid_or_not_written(
    data: bytes, folder: Path
) -> object:
    (folder / "config.yaml").write_bytes(data)
    accepted = command("config", "upgrade", "config.yaml", "-o", "new.yaml")
    assert (folder / "new.yaml").exists() == accepted
    assert not accepted or command("config", "check", "--full", "new.yaml")
    return accepted


@fuzz(
    st.tuples(_curricula(), _SAMPLERS, st.sampled_from(("Wall.json", "a.yaml", "a.JSON"))),
    examples=80,
)
def test_changed_curriculum_and_sampler_files_are_read_or_refused(
    example: tuple[bytes, bytes, str], folder: Path
) -> object:
    curriculum, sampler, name = example
    (folder / name).write_bytes(curriculum)
    (folder / "sampler.yaml").write_bytes(sampler)
    (folder / "config.yaml").write_text(_SECTIONS.partition("parameter_")[0])
    accepted = command("config", "check", "config.yaml", "--curriculum", name)
    accepted &= command("config", "check", "config.yaml", "--sampler", "sampler.yaml")
    return accepted


_PARAMETERS = st.sampled_from(
    (
        _OTHERS,
        (_ROOT / "params.yaml").read_text(),
        *(path.read_text() for path in sorted((_ROOT / "tests/workflow").glob("*.yaml"))),
    )
)


@fuzz(_spoiled(_PARAMETERS), examples=120)
def test_changed_params_yaml_gives_a_plan_or_is_refused(data: bytes, folder: Path) -> None:
    (folder / "params.yaml").write_bytes(data)
    (folder / "config").symlink_to(_ROOT / "config")
    write_plan(load_params(Path("params.yaml")))


@fuzz(_spoiled(st.just(_MANIFEST)), examples=40)
def test_changed_manifests_are_read_or_refused(data: bytes, folder: Path) -> object:
    (folder / "manifest.yaml").write_bytes(data)
    return command("env", "list", "--manifest", "manifest.yaml")
