"""Exported policies in MLflow's model registry, with aliases on the best evaluated ones.

A registered model is a behavior of an environment, since only their returns can be compared; a
version is a run's policy. `best` is the version with the highest mean return in evaluation, and the
name of an experiment is an alias of the best among its seeds. Only versions that were evaluated in
the present build of the environment count, and an equal score moves nothing.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

BEST = "best"
SCORE, BUILD, EXPERIMENT, CONTENT = "score", "environment.dvc", "experiment", "sha256"
"""Tags of a version: mean return, digest of the build it was evaluated in, experiment, file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """A version that was evaluated."""

    version: str
    score: float
    build: str
    """Digest of the environment that it was evaluated in."""
    experiment: str


def model_name(environment: str, behavior: str) -> str:
    """The registered model of a behavior; MLflow refuses slashes and colons."""
    return re.sub(r"[/:]", "_", f"{environment}.{behavior}")


def alias_of(experiment: str) -> str:
    """An experiment's name as an alias, which has letters, digits, dashes and underscores."""
    text = re.sub(r"[^A-Za-z0-9_-]", "_", experiment)
    reserved = re.fullmatch(r"[vV]\d+|latest|best", text)
    return f"{text}_" if reserved else text


def best(versions: Iterable[Scored], build: str, incumbent: str | None) -> str | None:
    """The version with the highest score in a build; the incumbent stays when it is as good.

    Args:
        versions: those that may be chosen.
        build: digest of the environment that scores are compared in.
        incumbent: version that has the alias now.
    """
    fair = [one for one in versions if one.build == build]
    if not fair:
        return incumbent
    top = max(one.score for one in fair)
    winners = [one.version for one in fair if one.score == top]
    return incumbent if incumbent in winners else min(winners, key=int)


def register(client: Any, name: str, source: str, run: str, tags: Mapping[str, str]) -> str:
    """A new version of a registered model, which is made when it is not there.

    Args:
        client: of MLflow.
        name: registered model.
        source: id of the logged model.
        run: that made it.
        tags: of the version.

    Returns:
        The version's number.
    """
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(
            name,
            description=(
                "Policies for Unity as ONNX, a version for each run. `best` has the highest mean "
                "return in evaluation; an experiment's alias is the best of its seeds."
            ),
        )
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    made = client.create_model_version(
        name, source=f"models:/{source}", run_id=run, model_id=source, tags=dict(tags)
    )
    # by this tag the pages of runs and models know that a logged model is registered, and as what
    known = json.dumps([{"name": name, "version": made.version}])
    client.set_logged_model_tags(source, {"mlflow.modelVersions": known})
    return str(made.version)


def versions_of(client: Any, run: str) -> list[Any]:
    """The versions that a run made, newest first."""
    found = client.search_model_versions(f"run_id = '{run}'")
    return sorted(found, key=lambda one: int(one.version), reverse=True)


def score(client: Any, run: str, name: str, tags: Mapping[str, str]) -> None:
    """Note how a run's policy did in evaluation, and move the aliases where it is the best.

    Args:
        client: of MLflow.
        run: that made the policy.
        name: registered model.
        tags: of its newest version; they hold SCORE, BUILD and EXPERIMENT.
    """
    mine = [one for one in versions_of(client, run) if one.name == name]
    if not mine:
        return
    for key, value in tags.items():
        client.set_model_version_tag(name, mine[0].version, key, value)
    scored = [_scored(one) for one in client.search_model_versions(f"name = '{name}'")]
    known = [one for one in scored if one is not None]
    aliases = client.get_registered_model(name).aliases
    experiment = tags[EXPERIMENT]
    of_experiment = [one for one in known if one.experiment == experiment]
    for alias, among in ((BEST, known), (alias_of(experiment), of_experiment)):
        now = aliases.get(alias)
        chosen = best(among, tags[BUILD], None if now is None else str(now))
        if chosen is not None and chosen != str(now):
            client.set_registered_model_alias(name, alias, chosen)


def _scored(version: Any) -> Scored | None:
    tags = version.tags
    if not {SCORE, BUILD, EXPERIMENT} <= tags.keys():
        return None
    return Scored(
        version=str(version.version),
        score=float(tags[SCORE]),
        build=tags[BUILD],
        experiment=tags[EXPERIMENT],
    )
