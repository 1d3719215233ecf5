"""Each stage once, through both engines, for the short `make test`."""

from pathlib import Path

import pytest
from project import REPRO, copy_project, fast_stages, init_dvc, ran, set_params, tiny

from pipeline.dag import engines


@pytest.mark.parametrize("engine", REPRO)
def test_first_call_of_the_engine_runs_every_stage_and_the_second_call_runs_none(
    engine: str, tmp_path: Path
):
    root = copy_project(tmp_path / "project")
    content = tiny("cloned")
    del content["experiments"]["cloned"]["evaluation"]["video"]
    set_params(root, content)
    init_dvc(root)
    fast_stages(root)
    learned = [f"{stage} cloned --seed 1" for stage in ("pretrain", "train", "export", "evaluate")]
    stages = ["env balance_ball", "demos balance_ball_expert", *learned, "report"]
    assert ran(root, *REPRO[engine]) == sorted(stages)
    assert ran(root, *REPRO[engine]) == []


@pytest.mark.parametrize("engine", REPRO)
def test_new_or_edited_claims_rerun_only_the_report(engine: str, tmp_path: Path):
    root = copy_project(tmp_path / "project")
    set_params(root, tiny("plain"))
    init_dvc(root)
    fast_stages(root)
    assert "report" in ran(root, *REPRO[engine])
    for text in ("# no claim\n", "# none\n"):
        (root / "claims.yaml").write_text(text)
        engines.note_sources(root)  # as `pipeline run` and `pipeline claims write` do for DVC
        assert ran(root, *REPRO[engine]) == ["report"]
    assert ran(root, *REPRO[engine]) == []
