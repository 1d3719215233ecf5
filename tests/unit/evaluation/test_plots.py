import numpy as np
import pytest
from PIL import Image

from pipeline.evaluation.charts import align_curves, charts_of, learning
from pipeline.evaluation.comparison import Curve, Outcome, compare
from pipeline.evaluation.plots import plot, plot_returns


def task(n_seeds=5, n_points=20, seed=0):
    rng = np.random.default_rng(seed)
    steps = np.linspace(0.0, 95_000.0, n_points)
    outcomes = [
        Outcome(
            experiment=name,
            environment="",
            behavior="B",
            seed=k,
            evaluated=k + shift,
            curve=Curve(steps=steps + 100 * k, returns=rng.normal(steps / 1e4, 1.0)),
        )
        for name, shift in (("a", 0.0), ("b", 2.0))
        for k in range(n_seeds)
    ]
    (made,) = compare(outcomes)
    return made


def pixels(path):
    with Image.open(path) as image:
        assert image.format == "PNG"
        assert image.info.keys() <= {"dpi"}
        return np.asarray(image.convert("RGB"))


@pytest.mark.parametrize("returns", [[1.0, 2.0, 2.5, 9.0] * 20, [-1.0] * 5, [0.5], [0.0, 1e-12]])
def test_equal_returns_give_figures_with_equal_bytes_and_without_metadata(tmp_path, returns):
    first, second = tmp_path / "one.png", tmp_path / "two.png"
    plot_returns(first, returns, title="Returns")
    plot_returns(second, returns, title="Returns")
    assert first.read_bytes() == second.read_bytes()
    assert len(np.unique(pixels(first).reshape(-1, 3), axis=0)) > 10


def test_figure_bytes_are_equal_for_equal_comparisons_and_differ_for_different_curves(tmp_path):
    pictures = {}
    for name, seed in (("one", 0), ("two", 0), ("other", 1)):
        for chart in charts_of(task(seed=seed)):
            plot(tmp_path / "a.png", chart)
            pictures[name, chart.file] = (tmp_path / "a.png").read_bytes()
            assert len(np.unique(pixels(tmp_path / "a.png").reshape(-1, 3), axis=0)) > 10
            if chart.file == "learning":
                assert pixels(tmp_path / "a.png").shape == (585, 1050, 3)
    for kind in ("returns", "learning", "improvement"):
        assert pictures["one", kind] == pictures["two", kind]
    assert pictures["one", "learning"] != pictures["other", "learning"]


def test_figures_do_not_depend_on_the_matplotlib_style_of_the_user(tmp_path):
    import matplotlib as mpl

    plot_returns(tmp_path / "a.png", [1.0, 2.0], title="Returns")
    with mpl.rc_context({"axes.facecolor": "black", "lines.linewidth": 9, "font.size": 30}):
        plot_returns(tmp_path / "b.png", [1.0, 2.0], title="Returns")
        assert mpl.rcParams["font.size"] == 30
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_curves_are_interpolated_only_within_the_steps_that_all_seeds_share():
    steps, values = align_curves([([0, 10, 20], [0.0, 1.0, 2.0]), ([5, 15], [5.0, 7.0])])
    np.testing.assert_array_equal(steps, [5, 10, 15])
    np.testing.assert_allclose(values, [[0.5, 1.0, 1.5], [5.0, 6.0, 7.0]])


def test_aligned_curves_without_common_steps_are_empty():
    assert align_curves([([0, 1], [0.0, 1.0]), ([5, 6], [0.0, 1.0])])[1].shape == (2, 0)


def test_few_seeds_are_drawn_as_lines_and_more_seeds_as_a_band():
    few, enough = (learning(task(n)).series[0] for n in (2, 3))
    assert few.band is None
    assert [(name, thin) for name, _, thin in few.lines] == [
        ("a, seed 0", False),
        ("a, seed 1", False),
    ]
    low, high = enough.band
    assert (low <= enough.middle).all()
    assert (enough.middle <= high).all()
    assert (low < high).any()
    assert [thin for _, _, thin in enough.lines] == [True] * 3 + [False]


def test_long_curves_are_reduced_to_200_points_with_both_ends():
    series = learning(task(1, n_points=1000)).series[0]
    assert len(series.steps) == 200
    assert (series.steps[0], series.steps[-1]) == (0.0, 95_000.0)
