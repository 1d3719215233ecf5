"""A run's model card, pushed to a Hub and pulled from it; the Hub is a local server."""

from pathlib import Path

import hub_server
import pytest
import yaml
from interpreter import python
from onnx import TensorProto, helper

from pipeline.settings.yaml_file import dump_yaml

POLICY = "Echo.onnx"


@pytest.fixture
def trained(learn, fake, tmp_path: Path) -> Path:
    """A run folder of `pipeline learn`, below `results` in the working folder."""
    assert learn("--env", fake(), "--run-id", "first") == 0
    return tmp_path / "results/first"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch) -> Path:
    """A folder as `pipeline card` writes it, with a small policy."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "card"
    path.mkdir()
    (path / "README.md").write_text("---\ntags: [onnx]\n---\n# Echo\n")
    action = helper.make_tensor_value_info("action" * 20, TensorProto.FLOAT, [1])
    model = helper.make_model(helper.make_graph([], "policy", [], [action]))
    (path / POLICY).write_bytes(model.SerializeToString())
    return path


def test_model_card_describes_the_run_and_is_not_written_over_an_existing_file(
    trained, tmp_path: Path, refused, printed
):
    printed("card", "results/first", "-o", "card", "--license", "cc-by-4.0")
    text = (tmp_path / "card/README.md").read_text()
    _, front, body = text.split("---\n", 2)
    meta = yaml.safe_load(front)
    assert meta["license"] == "cc-by-4.0"
    assert {"Echo", "reinforcement-learning", "ML-Agents-Echo"} <= set(meta["tags"])
    for section in ("Task", "Scores", "Learning curve", "Use", "Settings", "Provenance", "Licence"):
        assert f"\n## {section}\n" in body
    assert "| in | obs_0 | float32 | ('batch', 4) |" in body
    assert "hidden_units: 16" in body
    assert "at the end of training" in body
    assert (tmp_path / "card/learning_Echo.png").stat().st_size > 1000
    assert (tmp_path / "card" / POLICY).read_bytes() == (trained / POLICY).read_bytes()
    assert str(tmp_path) not in body
    printed("card", "results/first", "--license", "cc-by-4.0")
    assert (tmp_path / "cards/first/README.md").read_text() == text
    assert "exists and is not empty" in refused("card", "results/first", "-o", "card")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["card", "nothing", "-o", "x"], "nothing: is not a run; give <experiment>-<seed>"),
        (["card", "walk-1", "-o", "x"], "params.yaml has no such run; it has"),
        (["card", "results/none", "-o", "x"], "results/none: has no policy (*.onnx) yet"),
        (["card", "results/none", "-o", "card"], "has no policy"),
        (["push", "--repo-id", "me/x"], "give the run to push"),
        (["push", "other", "--repo-id", "me/x"], "other: is not a run"),
        (["push", "card", "--repo-id", "me/x", "--license", "mit"], "give --license to"),
        (["push", "card", "--repo-id", "me/x", "--configfile-name", "a"], "--configfile-name: a"),
        (["push", "card", "--repo-id", "a/b/c"], "a/b/c: HFValidationError"),
        (["pull"], "give the repository"),
        (["pull", "me/card"], "card: exists and is not empty"),
    ],
)
def test_card_push_and_pull_report_mistakes_in_one_line(words, said, folder, tmp_path, refused):
    (tmp_path / "results/none").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/README.md").write_text("# A checkout, with secrets\n")
    (tmp_path / "results/none/configuration.yaml").write_text(dump_yaml({"behaviors": {}}))
    (tmp_path / "params.yaml").write_text("experiments: {}\n")
    if words[:2] == ["card", "nothing"]:
        (tmp_path / "params.yaml").unlink()
    assert said in refused(*words)
    assert not (tmp_path / "x").exists()


@pytest.mark.slow
def test_pushed_policy_is_pulled_with_the_same_bytes(trained: Path, tmp_path: Path):
    def run(*words: str, module: str = "from pipeline.__main__ import main") -> str:
        variables = {
            "HF_ENDPOINT": hub.url,
            "HF_TOKEN": token,
            "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_DISABLE_XET": "1",  # the Xet protocol needs another server
        }
        code = f"import sys; {module}; sys.exit(main())"
        completed = python("-c", code, *words, check=False, **variables)
        return f"{completed.returncode} {completed.stdout}{completed.stderr}"

    token = hub_server.TOKEN
    with hub_server.hub() as hub:
        assert run("card", "results/first", "-o", "card").startswith("0 ")
        output = run("push", "card", "--repo-id", "me/echo", "--commit-message", "ours")
        assert output.startswith(f"0 Pushed {POLICY}, README.md"), output
        assert hub.messages == ["ours"]
        assert run("pull", "me/echo", "-o", "theirs").startswith("0 theirs: Echo.onnx, README.md")
        ours, theirs = (tmp_path / name / POLICY for name in ("card", "theirs"))
        assert ours.read_bytes() == theirs.read_bytes()
        hub.repos["me/evil"] = {"../evil": b""}
        assert run("pull", "me/evil") == (
            "2 error: me/evil: has the file '../evil' outside the repository's folder; nothing was "
            "downloaded\n"
        )
        assert run("pull", "me/none").startswith("2 error: me/none: RepositoryNotFoundError")
        # under ML-Agents' names
        push = "from pipeline.__main__ import mlagents_push_to_hf as main"
        load = "from pipeline.__main__ import mlagents_load_from_hf as main"
        push_options = ["--run-id=first", "--local-dir", "results/first", "--repo-id", "me/first"]
        assert run(*push_options, module=push).startswith("0 Pushed")
        assert "configuration.yaml" in hub.repos["me/first"]
        load_options = ["--repo-id", "me/first", "--local-dir", "down"]
        assert run(*load_options, module=load).startswith("0 down/first: Echo.onnx")
        assert (tmp_path / "down/first" / POLICY).read_bytes() == (trained / POLICY).read_bytes()
        token = "another"  # noqa: S105
        assert run("push", "card", "--repo-id", "me/echo").startswith("2 error: me/echo: ")
    offline_output = run("push", "card", "--repo-id", "me/echo")
    assert offline_output.startswith("2 error: me/echo: ")
    assert offline_output.count("\n") == 1
