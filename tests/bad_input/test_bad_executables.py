"""Environments that cannot be started, and files that do not exist."""

import shutil


def test_output_of_an_executable_that_exits_at_once_is_in_the_error(place):
    place.config()
    env = place.fake("--mode", "exit")
    before = place.files()
    error = place.learn(env).error
    assert "return code 3" in error
    assert error.endswith("| fake environment starts | cannot find the scene")
    assert place.files() == before


def test_option_force_replaces_an_earlier_run_only_after_the_new_run_has_started(place, trained):
    shutil.copytree(trained.folder / "results", place.folder / "results")
    place.config()
    env = place.fake()
    before = place.files()
    assert place.learn("nowhere", "--force").code == 2
    assert place.files() == before
    assert place.program("exit 1", name="broken").exists()
    assert place.learn("broken", "--force").code == 2
    (place.folder / "broken").unlink()
    assert place.files() == before
    result = place.learn(env, "--force")
    assert result.code == 0, result.err
    assert "Renamed the folder of the earlier run to results/run.1." in result.err
    results = place.folder / "results"
    assert sorted(path.name for path in results.iterdir()) == ["run", "run.1"]
    after = place.files()
    for path, content in before.items():
        if path.startswith(str(results / "run/")):
            assert after[path.replace("/results/run/", "/results/run.1/")] == content
    assert place.learn(env, "--force").code == 0
    assert sorted(path.name for path in results.iterdir()) == ["run", "run.1", "run.2"]


def test_missing_file_is_reported_and_a_similar_file_name_is_proposed(here, refused):
    for name in ("Ball.onnx", "timers.json"):
        (here / name).touch()
    for words, missing in {
        "evaluate Bal.onnx --env balance_ball": "Bal.onnx",
        "onnx check Bal.onnx": "Bal.onnx",
        "timers timer.json": "timer.json",
    }.items():
        error = refused(*words.split())
        assert missing in error
        assert "; did you mean '" in error
