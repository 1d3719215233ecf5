from __future__ import annotations

import re

import numpy as np

from pipeline.dag.reporting import render, svg
from pipeline.dag.stages import report
from pipeline.evaluation.charts import charts_of, learning, scores
from pipeline.evaluation.comparison import Curve, Outcome, compare

STEPS = np.array([1000.0, 2000.0, 3000.0])


def test_figure_file_names_are_unique_and_ordinary_names_stay_unchanged():
    ordinary = ["pong-Pong", "CartPole-v1-CartPole-v1", "a.b_c-D"]
    assert [report._file_name(text) for text in ordinary] == ordinary
    texts = ["a b", "a_b", "a/b", "a~20~b", "a~b", "ä b", "../a", ""]
    names = [report._file_name(text) for text in texts]
    assert len(set(names)) == len(texts)
    assert not any(set(name) & set("/\\%#? ") for name in names)


def page(tmp_path, n_seeds=3, names=("ppo", "<b>cloned</b>"), **changes):
    outcomes = [
        Outcome(
            experiment=name,
            environment="ball",
            behavior="Ball",
            seed=seed,
            curve=Curve(steps=STEPS, returns=STEPS / 1000 * level + seed / 8),
            **{"evaluated": 10.0 * level + seed} | changes,
        )
        for level, name in enumerate(names, start=1)
        for seed in range(7, 7 + n_seeds)
    ]
    [task] = compare(outcomes)
    charts = charts_of(task)
    return task, charts, render.html([task], [[]], [charts], [[]], tmp_path, {})


def test_html_report_needs_no_other_file_and_no_script(tmp_path):
    _, _, text = page(tmp_path)
    assert not re.search(r"""(src|href)=["']?https?:|@import|url\((?!#)""", text)
    without = re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
    # the script shows the value under the pointer for all marks of one class
    (kind,) = re.findall(r'svg\.querySelectorAll\("\.(\w+)"\)', text)
    assert len(re.findall(rf'class="[\w ]*\b{kind}"', without)) > 4
    # the text of each point is in the page, so that browsers show it and readers can search it
    assert "<title>ppo, seed 7: 17</title>" in without
    assert "<title>&lt;b&gt;cloned&lt;/b&gt;, IQM</title>" in without
    assert "<b>cloned" not in text
    assert without.count('<input type="checkbox" checked class="s') == 2
    assert "figure:has(input.s1:not(:checked)) g.s1" in without


def test_column_headers_in_the_report_link_to_their_definitions(tmp_path):
    _, _, text = page(tmp_path)
    headers = dict(re.findall(r'<th[^>]*><a href="#([^"]+)">([^<]+)</a></th>', text))
    terms = dict(re.findall(r'<dt id="([^"]+)">([^<]+)</dt>', text))
    assert set(terms.values()) == set(render.TERMS)
    assert {"Mean height", "By chance", "90 % tolerance"} <= set(headers.values())
    assert headers.items() <= terms.items()


def test_report_explains_the_target_return_by_the_lowest_and_the_best_return(tmp_path):
    # the lowest first mean is 1 + 8 / 8, and the best last mean is 6 + 8 / 8
    _, _, text = page(tmp_path)
    assert "a mean return of 6.5 in training, 90 % of the way from 2, the lowest" in text
    assert "experiment, to 7, the best final one" in text


def test_curve_in_the_report_has_a_step_and_a_value_for_every_point(tmp_path):
    groups = re.findall(r'<g [^>]*data-steps="([^"]*)".*?>(.*?)</g>', page(tmp_path)[2], re.DOTALL)
    counts = [
        tuple(len(texts.split()) for texts in (steps, *line))
        for steps, group in groups
        for line in re.findall(r'<polyline [^>]*data-values="([^"]*)" points="([^"]*)"', group)
    ]
    # for two experiments: a line for each of three seeds, and a line for their IQM
    assert counts == [(3, 3, 3)] * 8


def test_points_of_a_curve_are_drawn_at_the_pixels_of_steps_and_values(tmp_path):
    _, (_, chart), text = page(tmp_path)
    canvas = svg.canvas_of(chart)
    (line,) = re.findall(r"<polyline .*?><title>&lt;b&gt;cloned&lt;/b&gt;, seed 9</title>", text)
    assert 'data-values="3.125 5.125 7.125"' in line
    points = re.search(r' points="([^"]*)"', line)[1]
    places = [tuple(map(float, point.split(","))) for point in points.split()]
    expected = zip(canvas.x.at(STEPS), canvas.y.at(STEPS / 500 + 9 / 8), strict=True)
    np.testing.assert_allclose(places, [*expected], atol=0.05)
    # a larger value is higher, which is a smaller pixel
    assert places[0][1] > places[2][1]


def test_curves_of_single_seeds_are_drawn_if_there_are_too_few_seeds_for_an_interval(tmp_path):
    task, _, text = page(tmp_path, n_seeds=1, names=("ppo",))
    series, row = learning(task).series[0], scores(task).rows[0]
    assert [name for name, *_ in series.lines] == ["ppo, seed 7"]
    assert not series.band
    assert row.interval is row.wider is None
    assert "Probability of improvement" not in text
    assert not re.search(r"\bnan\b", text)


def test_report_shows_intervals_and_probabilities_of_improvement_only_with_enough_seeds(tmp_path):
    pages = [page(tmp_path, n_seeds=n) for n in (2, 3, 4, 5)]
    for text, shown in (
        ("Thin lines are seeds", [False, True, True, True]),
        ("The thin line is the 90 % tolerance interval", [False, False, False, True]),
        ("Probability of improvement", [False, False, False, True]),
    ):
        assert [text in one[2] for one in pages] == shown
    four, five = ([figure.what for figure in report._draw(*one[:2], tmp_path)] for one in pages[2:])
    assert five == [*four, "Probability of improvement on ball: Ball"]
    assert page(tmp_path, n_seeds=5)[2] == pages[3][2], "equal results give an equal page"


def test_caption_of_learning_curves_says_that_training_samples_its_actions(tmp_path):
    lower = "Actions in training are sampled; scores are of the most probable actions"
    captions = [
        learning(page(tmp_path, n_seeds=2, **changes)[0]).caption
        for changes in ({}, {"stochastic": True}, {"evaluated": None})
    ]
    assert [lower in caption for caption in captions] == [True, False, False]
    assert all(caption.endswith("Actions in training are sampled.") for caption in captions[1:])


def test_axis_ticks_of_a_figure_have_a_distance_of_1_2_or_5_times_a_power_of_ten():
    def ticks(low, high):
        axis = svg.Axis(low, high, 0.0, 1.0)
        return [text for _, text in axis.ticks(steps=True)]

    # not in steps of 800, which is a fifth of the range
    assert ticks(1000.0, 5000.0) == ["1k", "2k", "3k", "4k", "5k"]
    assert ticks(0.0, 1.2e6) == ["0", "500k", "1M"]
    assert ticks(0.0, 900.0) == ["0", "200", "400", "600", "800"]


def test_curve_is_labeled_with_its_own_seed_if_another_seed_has_no_curve(tmp_path):
    curve = Curve(steps=STEPS, returns=STEPS)
    common = {"experiment": "ppo", "environment": "ball", "behavior": "Ball"}
    outcomes = [
        Outcome(**common, seed=seed, evaluated=1.0, curve=curve if seed == 2 else None)
        for seed in (1, 2)
    ]
    [task] = compare(outcomes)
    assert [name for name, *_ in learning(task).series[0].lines] == ["ppo, seed 2"]
