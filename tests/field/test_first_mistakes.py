"""What a newcomer got wrong, and what the program made of it."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

import pipeline
from pipeline import cli

TOO_SHORT = "max_steps {} ends the run before the first update, for which hyperparameters.{} {} "
SIZES = [
    ("ppo", {"max_steps": 99, "buffer_size": 100, "batch_size": 50}, ("buffer_size", 100)),
    ("poca", {"max_steps": 99, "buffer_size": 100, "batch_size": 50}, ("buffer_size", 100)),
    ("sac", {"max_steps": 99, "buffer_init_steps": 100}, ("batch_size", 128)),
    ("sac", {"max_steps": 199, "buffer_init_steps": 200}, ("buffer_init_steps", 200)),
    ("ppo", {"max_steps": 100, "buffer_size": 100, "batch_size": 100}, None),
    ("sac", {"max_steps": 200, "buffer_init_steps": 200}, None),
]


def trainer(kind: str, *, max_steps: int = 1000, **sizes: int) -> dict:
    network = {"hidden_units": 8, "num_layers": 1}
    top = {"trainer_type": kind, "max_steps": max_steps, "network_settings": network}
    return {"default_settings": {**top, "hyperparameters": sizes}}


def checked(tmp_path: Path, capsys, settings: dict) -> list[str]:
    path = tmp_path / "c.yaml"
    path.write_text(str(settings))  # JSON of numbers and words is YAML
    assert cli.main(["config", "check", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    return [line.partition("sizes: ")[2].strip() for line in lines if "sizes: " in line]


@pytest.mark.parametrize(("kind", "sizes", "missed"), SIZES)
def test_a_run_that_ends_before_its_first_update_is_remarked_on(
    kind, sizes, missed, tmp_path, capsys, caplog
):
    remarks = checked(tmp_path, capsys, trainer(kind, **sizes))
    expected = [] if missed is None else [TOO_SHORT.format(sizes["max_steps"], *missed)]
    assert [text.partition("has to be")[0] for text in remarks] == [
        f"default_settings: {text}" for text in expected
    ]
    if kind == "poca":
        return
    with caplog.at_level(logging.WARNING):
        done = pipeline.train("balance_ball", trainer(kind, **sizes), seed=1, run_dir=tmp_path)
    said = [one.message for one in caplog.records if "first update" in one.message]
    assert [text.partition("has to be")[0] for text in said] == [
        f"3DBall: {text}" for text in expected
    ]
    assert not expected or done.behaviors["3DBall"].n_updates == 0


@pytest.mark.parametrize(
    ("kind", "end"), [("ppo", "all in one minibatch"), ("sac", "nothing is learned")]
)
def test_a_minibatch_above_the_buffer_is_remarked_on(kind, end, tmp_path, capsys):
    (text,) = checked(tmp_path, capsys, trainer(kind, batch_size=65, buffer_size=64))
    assert text == (
        "default_settings: hyperparameters.batch_size 65 is above hyperparameters.buffer_size 64: "
        + end
    )
    assert checked(tmp_path, capsys, trainer(kind, batch_size=64, buffer_size=64)) == []
