"""How the experiment looks in MLflow's pages: its description, its kind, and prepared views.

MLflow stores a shared view as a tag of the experiment, and opens it by its key in the address. We
write such tags, so that the first page is grouped and has the columns that matter.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

TABLE, CURVES = "table", "curves"
"""Keys of the views."""
_MODE = "workflowType=machine_learning"
"""Without it MLflow's pages show the menu of their other mode, GenAI."""
MODELS = f"/#/models?{_MODE}"
"""Address of the registered models, below the server's own."""
SCORE = "evaluate/mean_return"
"""The metric that rows are ordered by."""
_SHARED = "mlflow.sharedViewState."
_NOTE = "mlflow.note.content"
_COLUMNS = {
    f"metrics.`{SCORE}`": 165,
    "metrics.`evaluate/ci_low`": 130,
    "metrics.`evaluate/ci_high`": 130,
    "metrics.`train/mean_reward`": 160,
    "metrics.`train/steps`": 100,
    "metrics.`train/training_s`": 130,
    "params.`trainer_type`": 105,
    "params.`learning_rate`": 110,
    "params.`environment`": 120,
    "attributes.`Models`": 190,
    "attributes.`Dataset`": 200,
}
"""The columns to show, with their widths in pixels: MLflow's default widths cut the names."""
# Without MLflow's duration: it goes from the first stage's start to the last stage's end, including
# the time between them, when other runs were at work. `train/training_s` is that of training.
_FIRST = {"1": 73, "attributes.`Run Name`": 270, "runDateAndNestInfo": 130}
"""MLflow's names for the ticks, the name and the age of a run."""


def address(identifier: str, view: str) -> str:
    """Return the address of a view, below the server's own."""
    # The same address as MLflow's pages make when somebody shares a view.
    mode = "&compareRunsMode=CHART" if view == CURVES else ""
    return f"/#/experiments/{identifier}/runs?{_MODE}&viewStateShareKey={view}{mode}"


def is_ours(tags: Mapping[str, str]) -> bool:
    """Return whether an experiment with these tags has the prepared views."""
    return f"{_SHARED}{TABLE}" in tags


def missing(identifier: str, present: Mapping[str, str]) -> dict[str, str]:
    """Return the tags for an experiment and its views that are not in `present`."""
    tags = {
        "mlflow.experimentKind": "custom_model_development",
        f"{_SHARED}{TABLE}": json.dumps(_state(grouped=True)),
        f"{_SHARED}{CURVES}": json.dumps(_state(grouped=False)),
    }
    if _NOTE not in present:  # else a user may have edited it
        tags[_NOTE] = _description(identifier)
    return {name: text for name, text in tags.items() if present.get(name) != text}


def _state(*, grouped: bool) -> dict[str, Any]:
    """Return a view as MLflow's page stores it."""
    group = {
        "aggregateFunction": "average",
        "groupByKeys": [{"mode": "tag", "groupByData": "pipeline.experiment"}],
    }
    widths = _FIRST | _COLUMNS
    return {
        # Rows that later runs have replaced stay in the store, and would count in the averages.
        "searchFilter": "tags.`pipeline.current` = 'yes'",
        "orderByKey": f"metrics.`{SCORE}`",
        "orderByAsc": False,
        "startTime": "ALL",
        "lifecycleFilter": "Active",
        "modelVersionFilter": "All Runs",
        "datasetsFilter": [],
        "selectedColumns": list(_COLUMNS),
        "columnOrder": list(widths),
        "columnWidths": widths,
        "runsHiddenMode": "FIRST_20_RUNS",
        "groupBy": group if grouped else None,
        "useGroupedValuesInCharts": False,
        "hideEmptyCharts": True,
    }


def _description(identifier: str) -> str:
    # [2:] leaves `/#` out: a link within MLflow's page begins at the `#`.
    return f"""\
One row is one experiment of `params.yaml` with one seed; all its stages write to it.

- [**All runs, grouped by experiment**](#{address(identifier, TABLE)[2:]}) with evaluations
- [**Learning curves**](#{address(identifier, CURVES)[2:]}) over environment steps
- The models are under *Model registry*: a model for each behavior of an environment, a version \
for each run. `best` is the best evaluated one, each experiment's name an alias of its own best.

Search with what a row holds: ``metrics.`{SCORE}` > 90``, `params.learning_rate = '0.0003'` \
(MLflow compares parameters as text), ``tags.`pipeline.experiment` = 'collector_ppo'``. \
``tags.`pipeline.current` = 'yes'`` leaves out what later runs have replaced; without it such rows \
lie folded below the one that replaced them.

The files in `results/` are the record and this is a view of them. `pipeline runs` says which row \
and which revision belong together.
"""
