"""A statistics writer as in ML-Agents' manual that records every call in a file."""

import json
from pathlib import Path

from mlagents.trainers.settings import RunOptions
from mlagents.trainers.stats import StatsPropertyType, StatsSummary, StatsWriter


class RecordingWriter(StatsWriter):
    def __init__(self, path):
        self.path = path
        self.added = {}

    def on_add_stat(self, category, key, value, aggregation):  # noqa: ARG002  # only counts
        self.added[key] = self.added.get(key, 0) + 1

    def write_stats(self, category: str, values: "dict[str, StatsSummary]", step: int) -> None:
        summaries = {
            key: [
                summary.aggregation_method.name,
                summary.num,
                float(summary.mean),
                float(summary.std),
                float(summary.sum),
                float(summary.aggregated_value),
                len(summary.full_dist),
            ]
            for key, summary in values.items()
        }
        self.note("write_stats", category, step=int(step), values=summaries, added=self.added)
        self.added = {}

    def add_property(self, category: str, property_type: StatsPropertyType, value) -> None:
        known = property_type in (StatsPropertyType.HYPERPARAMETERS, StatsPropertyType.SELF_PLAY)
        self.note("add_property", category, type=property_type.name, known=known, value=value)

    def note(self, call, category, **fields):
        with self.path.open("a") as lines:
            lines.write(json.dumps({"call": call, "category": category, **fields}) + "\n")


def get_writers(run_options: RunOptions) -> "list[StatsWriter]":
    return [RecordingWriter(Path(run_options.checkpoint_settings.write_path) / "calls.jsonl")]
