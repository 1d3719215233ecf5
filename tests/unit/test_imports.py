"""Modules that are not needed are not imported."""

import importlib

import pytest
from interpreter import python


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        (
            "from pipeline.cli.main import main\ntry: main(['--help'])\nexcept SystemExit: pass",
            "numpy torch mlflow dvc snakemake onnx grpc yaml matplotlib",
        ),
        ("import pipeline", "torch"),
        ("from pipeline import UnityEnvironment, ActionTuple, Callback, make_env, train", "torch"),
        (
            "import pipeline.envs.unity, pipeline.envs.gym_wrapper, pipeline.demos.demo_file\n"
            "import pipeline.envs.pettingzoo_wrapper, pipeline.envs.side_channels",
            "torch grpc",
        ),
        (
            "import pipeline.evaluation.plots, pipeline.evaluation.episodes\n"
            "import pipeline.evaluation.statistics, pipeline.evaluation.comparison\n"
            "import pipeline.export.publish, pipeline.export.policy",
            "matplotlib onnx onnxruntime torch pandas",
        ),
        (
            "import contextlib, io, tempfile\nfrom pipeline.cli import main as cli\n"
            "words = ['learn', '--env', './none', '--torch-device', 'cuda', '--results-dir']\n"
            "with tempfile.TemporaryDirectory() as folder, "
            "contextlib.redirect_stderr(io.StringIO()):\n"
            "    assert cli.main([*words, folder]) == 2",
            "torch",
        ),
    ],
)
def test_help_and_imports_that_need_no_torch_load_no_heavy_module(code, heavy):
    report_code = f"sys.stderr.write(' '.join(set({heavy.split()}) & sys.modules.keys()))"
    assert python("-c", f"import sys\n{code}\n{report_code}").stderr == ""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("pipeline.protocol.specs", "pipeline.core"),
        ("pipeline.stages.train", "pipeline.dag"),
        ("pipeline.settings.schema", "pipeline.settings.trainer.schema"),
    ],
)
def test_import_error_for_an_old_module_name_gives_the_new_module_name(old: str, new: str):
    with pytest.raises(ImportError, match=new):
        importlib.import_module(old)


def test_error_for_the_removed_command_python_m_pipeline_stages_names_the_new_command():
    completed = python("-m", "pipeline.stages", "train", check=False)
    assert completed.returncode == 2
    assert completed.stderr.startswith("error: pipeline.stages is now pipeline.dag; write ")
    assert completed.stderr.count("\n") == 1
