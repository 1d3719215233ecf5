"""A dvc.lock that is incomplete because DVC was killed while writing it."""

from pathlib import Path

import pytest
import yaml

from pipeline.dag.engines import truncate_incomplete_dvc_lock

STAGE = """\
  train@{name}-1:
    cmd: python workflow/scripts/train.py {name} --seed 1
    deps:
    - path: build/env/ball
      hash: md5
      md5: 6a204bd89f3c8348afd5c77c717a097a.dir
      size: 123
      nfiles: 2
    params:
      params.yaml:
        experiments.{name}.overrides:
          behaviors.3DBall.max_steps: 4000
        runtime:
          device: cpu
      workflow/runs.yaml:
        runs.train.{name}:
          seed: 1
    outs:
    - path: results/train/{name}/seed1/policy.pt
      hash: md5
      md5: 2dfb66460085b7f7034c66923c97ce9d
      size: 456
"""
NAMES = ("first", "second", "third")
LOCK = "schema: '2.0'\nstages:\n" + "".join(STAGE.format(name=name) for name in NAMES)
STAGE_LENGTH = len(LOCK) // len(NAMES)
READS = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@READS
def test_dvc_reads_a_lock_file_that_was_truncated_at_any_byte_and_then_repaired(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    from dvc.schema import COMPILED_LOCKFILE_SCHEMA

    expected = yaml.safe_load(LOCK)["stages"]
    path = tmp_path / "dvc.lock"
    n_mended = 0
    for end in [*range(0, STAGE_LENGTH, 2), *range(STAGE_LENGTH, len(LOCK), 7), len(LOCK)]:
        path.write_text(LOCK[:end])
        caplog.clear()
        truncate_incomplete_dvc_lock(tmp_path)
        if caplog.messages:
            n_mended += 1
        remaining = {}
        if path.exists():
            remaining = COMPILED_LOCKFILE_SCHEMA(yaml.safe_load(path.read_text()))["stages"]
        finished = LOCK[:end].count("size: 456\n")
        assert list(remaining)[:finished] == [f"train@{name}-1" for name in NAMES[:finished]], end
        for name in list(remaining)[:finished]:
            assert remaining[name] == expected[name], end
        assert len(remaining) <= finished + 1, end
    assert n_mended > len(NAMES) * 10


@pytest.mark.parametrize(
    "text",
    [
        LOCK,
        LOCK.replace("  train@second-1:\n", "<<<<<<< HEAD\n  train@second-1:\n"),
        LOCK.replace("    params:\n", "    params:\n=======\n", 1),
        "not DVC's",
    ],
)
def test_dvc_lock_that_is_complete_or_broken_in_another_way_is_unchanged(text: str, tmp_path: Path):
    path = tmp_path / "dvc.lock"
    path.write_text(text)
    truncate_incomplete_dvc_lock(tmp_path)
    assert path.read_text() == text


def test_missing_dvc_lock_is_no_error(tmp_path: Path):
    truncate_incomplete_dvc_lock(tmp_path)
    assert list(tmp_path.iterdir()) == []
