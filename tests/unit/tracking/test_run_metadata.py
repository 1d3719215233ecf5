import json
from pathlib import Path

from mlflow_runs import md5

from pipeline.tracking.run_metadata import dvc_digest, flat, parameters

SETTINGS = {
    "trainer_type": "ppo",
    "hyperparameters": {"learning_rate": 3e-4, "beta": None},
    "network_settings": {"hidden_units": 64, "memory": None},
    "reward_signals": {"extrinsic": {"gamma": 0.99}},
    "self_play": None,
}


def test_hyperparameters_have_short_names_and_empty_settings_are_left_out():
    assert parameters({"Walker": SETTINGS}) == {
        "trainer_type": "ppo",
        "learning_rate": 3e-4,
        "network_settings.hidden_units": 64,
        "reward_signals.extrinsic.gamma": 0.99,
    }


def test_the_digest_of_a_folder_is_the_digest_of_the_sorted_list_of_its_files(tmp_path: Path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b/c.txt").write_bytes(b"1")
    (tmp_path / "a.txt").write_bytes(b"2")
    (tmp_path / ".snakemake_timestamp").touch()
    md5_of_1, md5_of_2 = (md5(data) for data in (b"1", b"2"))
    listed = [{"md5": md5_of_2, "relpath": "a.txt"}, {"md5": md5_of_1, "relpath": "b/c.txt"}]
    expected = md5(json.dumps(listed).encode())
    assert dvc_digest(tmp_path) == f"{expected}.dir"
    assert dvc_digest(tmp_path / "a.txt") == md5_of_2


def test_names_of_metrics_and_settings_begin_with_the_behavior_if_there_are_several():
    metrics = {"A": {"reward": 1.0}, "B": {"reward": 2.0}}
    assert flat(metrics) == {"A/reward": 1.0, "B/reward": 2.0}
    assert flat({"A": metrics["A"]}) == {"reward": 1.0}
    settings = {name: {"hyperparameters": {"beta": k}} for k, name in enumerate("AB", 1)}
    assert parameters(settings) == {"A.beta": 1, "B.beta": 2}
