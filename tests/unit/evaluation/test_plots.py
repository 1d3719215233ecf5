from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from pipeline.evaluation.comparison import Outcome, compare
from pipeline.evaluation.plots import (
    align_curves,
    band,
    plot_improvements,
    plot_learning_curves,
    plot_returns,
    plot_standings,
)


def curves(n_seeds, seed=0):
    rng = np.random.default_rng(seed)
    steps = np.arange(0, 100_000, 5_000)
    return align_curves([(steps + 100 * k, rng.normal(steps / 1e4, 1.0)) for k in range(n_seeds)])


def pixels(path):
    with Image.open(path) as image:
        assert image.format == "PNG"
        assert image.info.keys() <= {"dpi"}
        return np.asarray(image.convert("RGB"))


@pytest.mark.parametrize("returns", [[1.0, 2.0, 2.5, 9.0] * 20, [-1.0] * 5, [0.5], [0.0, 1e-12]])
def test_equal_returns_give_equal_bytes_without_metadata(tmp_path, returns):
    first, second = tmp_path / "one.png", tmp_path / "two.png"
    plot_returns(first, returns, title="Returns")
    plot_returns(second, returns, title="Returns")
    assert first.read_bytes() == second.read_bytes()
    assert len(np.unique(pixels(first).reshape(-1, 3), axis=0)) > 10


def test_equal_curves_give_equal_bytes_and_other_curves_other_bytes(tmp_path):
    paths = [tmp_path / f"{k}.png" for k in range(3)]
    for path, seed in zip(paths, (0, 0, 1), strict=True):
        plot_learning_curves(path, {"PPO": curves(3, seed), "SAC": curves(1)}, title="Learning")
    first, second, third = (path.read_bytes() for path in paths)
    assert first == second != third
    assert pixels(paths[0]).shape == (585, 1050, 3)


def test_plot_without_curves_is_drawn(tmp_path):
    plot_learning_curves(tmp_path / "a.png", {}, title="Nothing yet")
    assert pixels(tmp_path / "a.png").min() < 100


def test_users_own_style_changes_nothing(tmp_path):
    import matplotlib as mpl

    plot_returns(tmp_path / "a.png", [1.0, 2.0], title="Returns")
    with mpl.rc_context({"axes.facecolor": "black", "lines.linewidth": 9, "font.size": 30}):
        plot_returns(tmp_path / "b.png", [1.0, 2.0], title="Returns")
        assert mpl.rcParams["font.size"] == 30
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_curves_are_interpolated_on_the_steps_that_every_seed_reached():
    aligned = align_curves([([0, 10, 20], [0.0, 1.0, 2.0]), ([5, 15], [5.0, 7.0])])
    np.testing.assert_array_equal(aligned.steps, [5, 10, 15])
    np.testing.assert_allclose(aligned.values, [[0.5, 1.0, 1.5], [5.0, 6.0, 7.0]])


def test_curves_without_common_steps_are_empty():
    assert align_curves([([0, 1], [0.0, 1.0]), ([5, 6], [0.0, 1.0])]).values.shape == (2, 0)


def test_few_seeds_are_drawn_one_by_one_and_more_as_a_band():
    assert band(curves(2)) is None
    middle, low, high = band(curves(3))
    assert (low <= middle).all()
    assert (middle <= high).all()
    assert (low < high).any()


def test_long_curves_are_thinned_with_their_ends_kept():
    steps = np.arange(1000.0)
    thinned = align_curves([(steps, 2 * steps)]).thinned()
    assert len(thinned.steps) == 200
    assert (thinned.steps[0], thinned.steps[-1]) == (0.0, 999.0)
    np.testing.assert_array_equal(thinned.values[0], 2 * thinned.steps)


def test_equal_comparisons_give_equal_bytes(tmp_path):
    outcomes = [
        Outcome(experiment=name, environment="", behavior="B", seed=k, evaluated=k + shift)
        for name, shift in (("a", 0.0), ("b", 2.0))
        for k in range(4)
    ]
    (task,) = compare(outcomes)
    for name in ("one", "two"):
        plot_standings(tmp_path / f"{name}-s.png", task.standings, title="T")
        plot_improvements(tmp_path / f"{name}-i.png", task.improvements, title="T")
    for kind in "si":
        first, second = (tmp_path / f"{name}-{kind}.png" for name in ("one", "two"))
        assert first.read_bytes() == second.read_bytes()
        assert len(np.unique(pixels(first).reshape(-1, 3), axis=0)) > 10
