"""Scores and aliases of model versions, in a registry that this file imitates."""

from types import SimpleNamespace

import numpy as np
import pytest
from mlflow.exceptions import MlflowException

from pipeline.tracking.mlflow_run import (
    BUILD,
    EXPERIMENT,
    SCORE,
    _move_aliases,
    alias_of,
    best,
    score,
)
from pipeline.tracking.mlflow_store import Store

NAME = "walk.Walker"


def version(number, run="run", name=NAME, **tags) -> SimpleNamespace:
    source = f"models:/m-{run}-{number}"
    return SimpleNamespace(version=number, run=run, name=name, source=source, tags=tags)


class Registry:
    """Versions of models, and their aliases.

    With `looks_early` the second version has no score in the first search. `refuses` is the number
    of times that a new alias is refused, as if another stage set it at the same time.
    """

    def __init__(self, *versions, looks_early=False, refuses=0, is_race=True) -> None:
        self.versions, self.aliases, self.metrics = list(versions), {}, []
        self.looks, self.looks_early, self.refuses, self.is_race = 0, looks_early, refuses, is_race
        self.n_read = 0

    def search_model_versions(self, query):
        self.looks += 1
        (key, value), *more = (part.split(" = ") for part in query.split(" and "))
        field = {"run_id": "run", "name": "name"}[key]
        found = [one for one in self.versions if getattr(one, field) == value.strip("'")]
        for tag, value in more:
            assert tag == f"tags.`{EXPERIMENT}`"
            found = [one for one in found if one.tags.get(EXPERIMENT) == value.strip("'")]
        self.n_read += len(found)
        if self.looks_early and self.looks == 1:
            return [found[0], version(found[1].version)]
        return found

    def set_model_version_tag(self, name, number, key, value):
        (one,) = (v for v in self.versions if (v.name, v.version) == (name, number))
        one.tags[key] = value

    def get_model_version_by_alias(self, name, alias):
        if alias not in self.aliases:
            raise MlflowException(f"Registered model alias {alias} not found.")
        wanted = (name, self.aliases[alias])
        (one,) = (v for v in self.versions if (v.name, v.version) == wanted)
        return one

    def log_metric(self, run, key, value, *, step, model_id):
        self.metrics.append((run, key, value, step, model_id))

    def get_registered_model(self, _):
        return SimpleNamespace(aliases=dict(self.aliases))

    def set_registered_model_alias(self, _, alias, number):
        if self.refuses:
            self.refuses -= 1
            self.aliases |= {alias: "1"} if self.is_race else {}
            raise MlflowException("UNIQUE constraint failed: registered_model_aliases.name")
        self.aliases[alias] = number


def test_score_is_tagged_on_the_newest_model_version_of_the_run_and_the_aliases_are_updated():
    scored = {SCORE: "9.0", BUILD: "now", EXPERIMENT: "other"}
    registry = Registry(
        version("2", SCORE="4.0"),
        version("10"),
        version("11", name="walk.Goalie"),
        version("3", "rival", **scored),
        version("4", "rival", **scored | {SCORE: "99.0", BUILD: "before"}),
    )
    score(registry, "run", NAME, {SCORE: "7.0", BUILD: "now", EXPERIMENT: "mine"})
    old, new, goalie = registry.versions[:3]
    assert new.tags == {SCORE: "7.0", BUILD: "now", EXPERIMENT: "mine"}
    assert (old.tags, goalie.tags) == ({"SCORE": "4.0"}, {})
    assert registry.metrics == [("run", "evaluate/mean_return", 7.0, 0, "m-run-10")]
    assert registry.aliases == {"best": "3", "mine": "10"}


def test_aliases_are_the_best_of_all_versions_but_few_scores_read_all_versions():
    rng, n, expected = np.random.default_rng(0), 40, {}
    registry = Registry(*(version(str(k), f"run{k}") for k in range(1, n + 1)))
    for turn in range(5 * n):
        number = rng.integers(1, n + 1)
        build, experiment = f"build{turn // 150}", f"e{number % 8}"
        tags = {SCORE: repr(float(rng.integers(n))), BUILD: build, EXPERIMENT: experiment}
        score(registry, f"run{number}", NAME, tags)
        scored = {v.version: v.tags for v in registry.versions if v.tags}
        own = {k: v for k, v in scored.items() if v[EXPERIMENT] == experiment}
        for alias, candidates in (("best", scored), (experiment, own)):
            expected[alias] = best(candidates, build, expected.get(alias))
        assert registry.aliases == expected
    assert registry.n_read / (5 * n) < n / 2


SCORED = {BUILD: "b", EXPERIMENT: "walk"}


@pytest.mark.parametrize(
    ("options", "looks"),
    [({"looks_early": True}, 3), ({"refuses": 1}, None), ({"refuses": 9, "is_race": False}, None)],
    ids=["scored at the same time", "set at the same time", "refused for another reason"],
)
def test_an_alias_moves_to_the_best_model_version_although_another_stage_runs_concurrently(
    options, looks
):
    """A stage first sees only its own score, or the store refuses its new alias."""
    versions = (version(k, **{SCORE: points}, **SCORED) for k, points in ((1, "5.0"), (2, "9.0")))
    registry = Registry(*versions, **options)
    if options.get("is_race", True):
        _move_aliases(registry, NAME, SCORED)
        assert registry.aliases == {"best": "2", "walk": "2"}
    else:
        with pytest.raises(MlflowException):
            _move_aliases(registry, NAME, SCORED)
        assert registry.aliases == {}
    assert looks in (None, registry.looks)


def test_scores_from_different_builds_of_the_environment_are_not_compared():
    old = {"1": {SCORE: "9.0", BUILD: "old"}, "3": {"seed": "7"}}
    new = {"2": {SCORE: "1.0", BUILD: "new"}}
    assert best(old | new, "new", "1") == "2"
    assert best(old, "new", "1") == "1"
    assert best({}, "new", None) is None
    assert best(old | {"10": {SCORE: "9.0", BUILD: "old"}}, "old", None) == "1"


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("walk", "walk"), ("sweep/001", "sweep_001"), ("best", "best_"), ("v2", "v2_")],
)
def test_the_alias_of_an_experiment_is_a_name_that_mlflow_accepts(name, wanted):
    assert alias_of(name) == wanted


def test_every_run_is_listed_although_mlflow_gives_them_in_pages():
    class Page(list):
        token = None

    def search_runs(experiments, *, max_results, page_token):
        assert experiments == ["1"]
        page = Page(range(1200)[int(page_token or 0) :][:max_results])
        page.token = str(page[-1] + 1) if page[-1] < 1199 else None
        return page

    client = SimpleNamespace(search_runs=search_runs)
    store = Store(uri="", is_local=True, experiment_id="1", client=client)
    assert [*store.runs()] == [*range(1200)]
