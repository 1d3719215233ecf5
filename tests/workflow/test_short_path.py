"""Each stage once, through both engines, for the short `make test`."""

from __future__ import annotations

from pathlib import Path

import pytest
from project import REPRO, copy_project, fast_stages, init_dvc, ran, set_params

from pipeline.dag import engines


@pytest.mark.parametrize("engine", REPRO)
def test_first_call_of_the_engine_runs_every_stage_and_the_second_call_runs_none(
    engine: str, tmp_path: Path
):
    root = copy_project(tmp_path / "project")
    tiny = Path(__file__).with_name("tiny.yaml").read_text()
    begin, _, cloned = tiny.partition("  plain:\n")
    cloned = cloned[cloned.index("  cloned:\n") :].replace("      video: true\n", "")
    set_params(root, begin + cloned)
    init_dvc(root)
    fast_stages(root)
    learned = [f"{stage} cloned --seed 1" for stage in ("pretrain", "train", "export", "evaluate")]
    stages = ["env balance_ball", "demos balance_ball_expert", *learned, "report"]
    assert ran(root, *REPRO[engine]) == sorted(stages)
    assert ran(root, *REPRO[engine]) == []


@pytest.mark.parametrize("engine", REPRO)
def test_new_or_edited_claims_rerun_only_the_report(engine: str, tmp_path: Path):
    root = copy_project(tmp_path / "project")
    tiny = Path(__file__).with_name("tiny.yaml").read_text()
    set_params(root, tiny.partition("  cloned:\n")[0])
    init_dvc(root)
    fast_stages(root)
    assert "report" in ran(root, *REPRO[engine])
    for text in ("# no claim\n", "# none\n"):
        (root / "claims.yaml").write_text(text)
        engines.note_sources(root)  # as `pipeline run` and `pipeline claims write` do for DVC
        assert ran(root, *REPRO[engine]) == ["report"]
    assert ran(root, *REPRO[engine]) == []
