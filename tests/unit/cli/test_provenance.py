import json
import shutil
from importlib import metadata
from pathlib import Path

import onnx
import pytest
from made_archives import zipped
from repositories import commit, git
from small_project import left

from pipeline.cli.provenance import commit_with
from pipeline.dag import provenance, sources
from pipeline.dag.attempt import digest_of
from pipeline.dag.project import checkout
from pipeline.settings import load_run_settings
from pipeline.simulators.pack import pack, packages_in


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository with two sources, an environment, and one commit."""
    root = tmp_path / "tree"
    (root / "src/pipeline").mkdir(parents=True)
    (root / "src/pipeline/a.py").write_text("a = 1\n")
    (root / "src/pipeline/b.py").write_text("b = 1\n")
    (root / "build/env/ball").mkdir(parents=True)
    (root / "build/env/ball/program").write_text("program")
    (root / ".gitignore").write_text("build\n")
    git(root, "init", "-q")
    commit(root, "first")
    return root


def record(tree: Path, **changes) -> provenance.Record:
    """Return a record as `pipeline learn` writes it, with an input whose path is known."""
    ball = tree / "build/env/ball"
    entry = {"name": "ball", "path": "build/env/ball", "sha256": digest_of(ball)}
    values = {
        "stage": "learn",
        "run": "first",
        "seed": 7,
        "parameters": {"learning_rate": 3e-4},
        "parameters_sha256": "p",
        "inputs": {"environment": entry},
        "versions": provenance.versions(),
        "code_sha256": "c",
        "sources": sources.ids(tree / "src", (tree / "src").rglob("*.py")),
    }
    return values | changes


def model(path: Path, *history: provenance.Record, graph: str = "g") -> Path:
    """Write an ONNX file, with the records of `history` if there are any."""
    ends = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1]) for name in "xy")
    node = onnx.helper.make_node("Identity", ["x"], ["y"])
    made = onnx.helper.make_graph([node], graph, *([end] for end in ends))
    proto = onnx.helper.make_model(made)
    if history:
        proto.metadata_props.add(key=provenance.KEY, value=provenance.text(history))
    path.write_bytes(proto.SerializeToString())
    return path


@pytest.fixture
def told(printed):
    """Compare a file with a tree; return the command's JSON."""
    return lambda file, tree: json.loads(printed("provenance", file, "--tree", tree, "--json"))


@pytest.fixture
def diff(printed):
    return lambda original, changed: printed("provenance", changed, "--diff", original)


def test_provenance_finds_the_git_commit_by_the_digests_of_source_files(tree):
    def found() -> tuple[str | None, str]:
        return commit_with(tree, {f"src/{k}": v for k, v in record(tree)["sources"].items()})

    file, first = tree / "src/pipeline/a.py", git(tree, "rev-parse", "HEAD")
    assert sources.git_id(file) == git(tree, "hash-object", str(file))
    (tree / "README.md").write_text("words")
    commit(tree, "words")
    assert found()[0] == first
    file.write_text("a = 2\n")
    commit_id, words = found()
    assert commit_id is None
    assert "not committed" in words
    commit(tree, "code")
    assert found()[0] == git(tree, "rev-parse", "HEAD")
    file.write_text("a = 1\n")
    assert found()[0] == first, "an earlier state again"


def test_provenance_knows_no_commit_without_a_git_repository(tmp_path):
    assert "no git repository" in commit_with(tmp_path, {})[1]
    git(tmp_path, "init", "-q")
    for name in ("src", "params.yaml"):  # a project of `pipeline init` has no src
        assert commit_with(tmp_path, {})[1] == "not known: no commit here has the folder src"
        (tmp_path / "params.yaml").write_text(name)
        commit(tmp_path, "a project of `pipeline init`")


def test_provenance_prints_run_seed_parameters_digests_and_interruptions(tree, tmp_path, printed):
    made_by = record(tree)
    assert provenance.interrupted(made_by, []) == made_by
    out = printed("provenance", model(tmp_path / "m.onnx", made_by), "--tree", tree)
    for text in (
        "run        first, seed 7",
        f"commit     {git(tree, 'rev-parse', 'HEAD')}",
        "learning_rate = 0.0003",
        f"environment ball  sha256 {digest_of(tree / 'build/env/ball')}",
        "same     code\n",
        "No compared value differs",
    ):
        assert text in out
    interrupted = provenance.interrupted(made_by, [1200, 3400])
    out = printed("provenance", model(tmp_path / "m.onnx", interrupted), "--tree", tree)
    assert "interrupted at steps 1200, 3400, not exact" in out
    assert "differs  interruptions of learn" in out


@pytest.mark.parametrize(
    ("changes", "first"),
    [
        ({"seed": 8}, "seed of learn\n  seed: 7, 8"),
        (
            {"parameters": {"learning_rate": 1e-3}, "versions": {}},
            "parameters of learn\n  learning_rate: 0.0003, 0.001\nalso: versions of learn",
        ),
        (
            {"inputs": {}, "versions": provenance.versions() | {"gymnasium": "1.0"}},
            'versions of learn\n  gymnasium: absent, "1.0"\nalso: inputs of learn',
        ),
        ({"inputs": {}}, "inputs of learn\n  environment ball: "),
        ({"versions": provenance.versions() | {"torch": "1.0"}}, "versions of learn\n  torch: "),
        (
            {"interrupted_at_steps": [5]},
            "interruptions of learn\n  not exact, at steps: absent, [5]",
        ),
        ({"stage": "train", "experiment": "e"}, "stages\n  learn in the first, train in"),
    ],
)
def test_diff_names_the_first_cause_of_a_difference(changes, first, tree, tmp_path, diff):
    original = model(tmp_path / "one.onnx", record(tree))
    changed = model(tmp_path / "two.onnx", record(tree, **changes), graph="other")
    assert f"The first cause by which they may differ: {first}" in diff(original, changed)


def test_diff_of_equal_records_names_equal_files_or_the_machine(tree, tmp_path, diff):
    original = model(tmp_path / "one.onnx", record(tree))
    same = model(tmp_path / "same.onnx", record(tree))
    assert "They are the same bytes." in diff(original, same)
    other = model(tmp_path / "other.onnx", record(tree, run="other"), graph="other")
    assert "The remaining cause is the machine" in diff(other, original)


def test_diff_of_equal_networks_names_differing_record_fields(tree, tmp_path, diff):
    inputs = record(tree)["inputs"]
    moved = {kind: entry | {"path": "other/ball"} for kind, entry in inputs.items()}
    original = model(tmp_path / "one.onnx", record(tree))
    for changes, difference in (
        ({"run": "other"}, 'record of learn\n  run: "first", "other"\n'),
        ({"inputs": moved}, "record of learn\n  inputs.environment.path: "),
        ({"seed": 8, "run": "other"}, "seed of learn\n  seed: 7, 8\n"),
    ):
        out = diff(original, model(tmp_path / "two.onnx", record(tree, **changes)))
        assert "The networks are equal" in out
        assert f"The first difference: {difference}" in out
        assert "The remaining cause is the machine" not in out


@pytest.mark.parametrize(
    ("kernels", "portable", "cause"),
    [
        ({"torch": "AVX512"}, False, 'machine of train\n  torch: "AVX2", "AVX512"'),
        ({"processor": "other"}, False, 'machine of train\n  processor: "one", "other"'),
        ({"variables": {"MKL_CBWR": "AVX2"}}, False, "machine of train\n  MKL_CBWR: absent, "),
        ({"processor": "other"}, True, None),
    ],
)
def test_diff_names_different_machines_if_both_runs_recorded_their_machine(
    kernels, portable, cause, tree, tmp_path, diff
):
    made_by = record(tree, stage="train", run="e/seed1", experiment="e", fingerprint="f")
    base_machine = {"portable": portable, "processor": "one", "variables": {}, "torch": "AVX2"}
    files = []
    for name, machine in (("one", base_machine), ("two", {**base_machine, **kernels})):
        stage = {"fingerprint": "f", "machine": machine}
        left(tmp_path / name, ".work/train", "e/seed1", stage=stage)
        files.append(model(tmp_path / name / "m.onnx", made_by, graph=name))
    lead = f"The first cause by which they may differ: {cause}"
    assert ("No recorded value differs" if cause is None else lead) in diff(*files)


def test_provenance_reports_edited_sources_and_environments_as_different(tree, tmp_path, told):
    file = model(tmp_path / "m.onnx", record(tree))
    (tree / "src/pipeline/a.py").write_text("a = 2\n")
    (tree / "src/pipeline/b.py").unlink()
    (tree / "build/env/ball/program").write_text("another")
    value = told(file, tree)
    assert value["verdict"] == "differs"
    details = {check["what"]: check["details"] for check in value["checks"]}
    assert details["code"] == ["src/pipeline/a.py has changed", "src/pipeline/b.py is missing"]
    assert details["environment ball"] == ["the content of build/env/ball has changed"]


def test_input_that_is_missing_from_the_source_tree_is_reported_as_unknown(tree, tmp_path, told):
    file = model(tmp_path / "m.onnx", record(tree))
    shutil.rmtree(tree / "build/env/ball")
    value = told(file, tree)
    verdicts = {check["what"]: check["verdict"] for check in value["checks"]}
    assert (verdicts["environment ball"], value["verdict"]) == ("unknown", "unknown")


@pytest.mark.parametrize(
    ("name", "now"),
    [
        ("torch", provenance.installed("torch")),
        *((name, "not installed") for name in ("a-plug-in-of-others", "", "../numpy")),
    ],
)
def test_provenance_reports_packages_now_installed_in_other_versions(
    tree, tmp_path, told, name, now
):
    old = provenance.versions() | {name: "1.0.0"}
    value = told(model(tmp_path / "m.onnx", record(tree, versions=old)), tree)
    (check,) = [entry for entry in value["checks"] if entry["what"] == "packages"]
    assert check["verdict"] == "differs"
    assert check["details"] == [f"{name} 1.0.0 then, {now} now"]


def test_record_repeats_the_digest_of_a_source_file_only_if_it_changed_between_stages(tree):
    export_record = record(tree, stage="export")
    export_record["sources"] = export_record["sources"] | {"pipeline/b.py": "0" * 40}
    stages = json.loads(provenance.text([record(tree), export_record]))["stages"]
    assert set(stages[0]["sources"]) == {"pipeline/a.py", "pipeline/b.py"}
    assert stages[1]["sources"] == {"pipeline/b.py": "0" * 40}


def learned(folder: Path, **changes) -> provenance.Record:
    folder.mkdir()
    (folder / "walker").write_text("program")
    (folder / "walker.demo").write_text("demonstration")
    cloning = {"demo_path": str(folder / "walker.demo")}
    values = {
        "behaviors": {"Walker": {"trainer_type": "ppo", "behavioral_cloning": cloning}},
        "env_settings": {"env_path": str(folder / "walker")},
        "checkpoint_settings": {"run_id": "walk", "results_dir": str(folder)},
    }
    return provenance.of_learn(load_run_settings(None, overrides=values | changes), 3, {})


def test_record_of_a_policy_trained_by_learn_has_digests_and_no_paths(tmp_path):
    first, second = learned(tmp_path / "one"), learned(tmp_path / "two")
    assert provenance.text([first]) == provenance.text([second])
    assert str(tmp_path) not in provenance.text([first])
    found = first["run"], first["seed"], first["inputs"]["environment"]["name"]
    assert found == ("walk", 3, "walker")
    demonstrations = first["inputs"]["demonstrations of Walker (behavioral_cloning)"]
    assert demonstrations["name"] == "walker.demo"
    assert len(demonstrations["sha256"]) == 64
    assert "pipeline/trainer/loop.py" in first["sources"]


def test_record_contains_the_versions_of_packages_in_a_packed_environment(tmp_path):
    program = tmp_path / "game"
    names = ("mujoco_core-4.0.1", "gymnasium-1.4.0", "protobuf-7.0", "numpy-1.0")
    files = {f"lib/{name}.dist-info/METADATA": b"" for name in names}
    files["lib/gymnasium/other-1.0.dist-info/METADATA"] = b""
    program.write_bytes(b"#!/bin/sh\n" + zipped(files))

    def recorded() -> dict[str, str]:
        settings = load_run_settings(None, overrides={"env_settings": {"env_path": str(program)}})
        return provenance.of_learn(settings, 3, {})["versions"]

    expected = provenance.versions() | {"mujoco-core": "4.0.1", "gymnasium": "1.4.0"}
    assert recorded() == expected
    program.rename(tmp_path / "game.x86_64")  # as a build whose suffix is not given
    assert recorded() == expected
    (tmp_path / "game.x86_64").write_bytes(b"\x7fELF")
    assert recorded() == provenance.versions()


def test_packages_in_a_packed_mujoco_simulator_include_the_version_of_mujoco(tmp_path):
    program = pack("balance_ball", tmp_path / "ball")
    assert packages_in(program)["mujoco-core"] == metadata.version("mujoco-core")


MISTAKES = {
    "no file": (lambda folder: folder / "absent.onnx", "cannot be read"),
    "another file": (lambda _: Path(__file__), "is not an ONNX model; give the .onnx file"),
    "a foreign model": (lambda folder: model(folder / "m.onnx"), "has no record of what made it"),
}


@pytest.mark.parametrize(("make", "expected"), MISTAKES.values(), ids=MISTAKES)
def test_provenance_reports_a_mistake_in_one_line(make, expected, tmp_path, refused):
    assert expected in refused("provenance", make(tmp_path))


DAMAGE = {
    **{f"no {key}": {key: None} for key in ("stage", "run", "seed", "inputs", "sources")},
    **{f"{key} of another kind": {key: [1]} for key in ("parameters", "versions", "inputs")},
    "a stage of the graph without its experiment": {"stage": "train"},
    "an input without a digest": {"inputs": {"environment": {"name": "ball"}}},
    "an input at a number": {"inputs": {"environment": {"name": "b", "sha256": "0", "path": 3}}},
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damaged_provenance_record_is_refused_in_one_line(damage, tree, tmp_path, refused):
    file = model(tmp_path / "m.onnx", record(tree))
    proto = onnx.load(file)
    stages = [record(tree), record(tree) | damage]
    text = json.dumps({"format": provenance.FORMAT, "stages": stages})
    proto.metadata_props[0].value = text
    file.write_bytes(proto.SerializeToString())
    assert "its provenance is damaged" in refused("provenance", file, "--tree", tree)


@pytest.mark.parametrize("path", ["../outside", "/etc/hostname"])
def test_no_file_is_read_for_a_provenance_record_with_a_path_outside_of_the_source_tree(
    path, tree, tmp_path, told
):
    (tmp_path / "outside").write_text("secret")
    entry = {"name": "ball", "path": path, "sha256": "0"}
    facts = told(model(tmp_path / "m.onnx", record(tree, inputs={"env": entry})), tree)
    (check,) = (row for row in facts["checks"] if row["what"] == "env ball")
    assert check["verdict"] == "unknown"


def test_folder_that_is_neither_a_checkout_nor_a_project_is_refused(tree, tmp_path, refused):
    file = model(tmp_path / "m.onnx", record(tree))
    assert "is neither a checkout" in refused("provenance", file, "--tree", tmp_path)


def project(folder: Path) -> Path:
    """Make a project as `pipeline init` does, whose code is elsewhere."""
    (folder / "results").mkdir(parents=True)
    for name in ("params.yaml", "dvc.yaml"):
        (folder / name).touch()
    return folder


@pytest.mark.parametrize(
    ("make", "inside", "heading", "conclusion"),
    [
        (project, "theirs", "Compared with {theirs}:", "That tree would not"),
        (project, "mine", "Compared with the present tree:", "The present tree would not"),
        (
            lambda folder: (folder / "results").mkdir(parents=True),
            "theirs",
            "Compared with {checkout}, the source of this program, because neither this folder nor "
            "a parent of the file has a params.yaml (--tree gives another folder):",
            "That tree would not",
        ),
    ],
)
def test_provenance_compares_a_policy_with_the_project_that_contains_the_policy_file(
    make, inside, heading, conclusion, tree, tmp_path, printed, monkeypatch
):
    """Regression: for a file of another project, the present tree was said to differ."""
    theirs, mine = tmp_path / "theirs", tmp_path / "mine"
    make(theirs)
    mine.mkdir()
    file = model(theirs / "results/m.onnx", record(tree))
    monkeypatch.chdir(project(mine / "project") if inside == "mine" else mine)
    lines = printed("provenance", file).splitlines()
    assert heading.format(theirs=theirs, checkout=checkout()) in lines
    assert lines[-1] == f"{conclusion} make the same file."


def test_provenance_accepts_a_project_made_by_pipeline_init(tree, tmp_path, told):
    theirs = project(tmp_path / "theirs")
    shutil.copytree(tree / "build", theirs / "build")
    checks = told(model(tmp_path / "m.onnx", record(tree)), theirs)["checks"]
    assert ("environment ball", "same") in [(check["what"], check["verdict"]) for check in checks]
