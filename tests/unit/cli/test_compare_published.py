"""`pipeline compare --with`: other people's results as one more experiment."""

import json
import re
from pathlib import Path

import pytest
from small_project import left, params_of

GYM = "environments: {hop: {source: gymnasium, id: Hopper-v4}}"
HEAD = "# note: CleanRL's training returns\nenvironment,seed,step,value\n"


def rows(name: str = "Ball", *, seeds: int = 3, level: float = 5.0) -> str:
    """Return curves that rise to about `level`, the last point before the others of each seed."""
    return "".join(
        f"{name},{seed},{step},{level * step / 3000 + seed / 10}\n"
        for seed in range(seeds)
        for step in (3000, 1000, 2000)
    )


@pytest.fixture
def root(here: Path) -> Path:
    params_of(here, a={"seeds": [1, 2, 3]})
    for seed in (1, 2, 3):
        left(here, "evaluate", f"a/seed{seed}", metrics={"Ball": {"mean_return": 10.0 + seed}})
        progress = "".join(f"Ball,{1000 * k},{k + seed / 10}\n" for k in (1, 2, 3))
        left(here, "train", f"a/seed{seed}", progress=progress)
    return here


def by_name(text: str) -> dict[str, dict[str, object]]:
    """Return the experiments in JSON by name, each with its note."""
    found = json.loads(text)
    notes = found.get("notes", {})
    return {
        one["experiment"]: one | {"note": notes.get(one["experiment"])}
        for one in found["experiments"]
    }


def test_published_training_returns_are_compared_with_the_last_values_of_our_curves(root, printed):
    Path("cleanrl.csv").write_text(HEAD + rows() + rows("Ant-v4"))
    found = by_name(printed("compare", "--with", "cleanrl.csv", "--json"))
    # the mean of 5.0, 5.1 and 5.2, against the ends of our curves: 3.1, 3.2 and 3.3
    assert (found["cleanrl"]["mean"], found["cleanrl"]["seeds"]) == (pytest.approx(5.1), 3)
    assert found["a"]["mean"] == pytest.approx(3.2)
    assert found["a"]["score"] == found["cleanrl"]["score"] == "training"
    assert found["cleanrl"]["trained_steps"] == 3000
    assert found["cleanrl"]["iqm_low"] < 5.1 < found["cleanrl"]["iqm_high"]
    assert found["cleanrl"]["note"] == (
        "Other people's results, measured by them: CleanRL's training returns. "
        "Left out, without an experiment here: Ant-v4."
    )
    text = printed("compare", "--with", "cleanrl.csv")
    assert re.search(r"^cleanrl +3 +5\.1 ", text, re.MULTILINE)
    assert "cleanrl (5.1) did better than a (3.2) on these seeds" in text
    assert "cleanrl: Other people's results, measured by them: CleanRL's training returns." in text


def test_published_evaluation_returns_are_compared_with_our_evaluation_returns(root, printed):
    Path("xqc.csv").write_text("# returns: evaluation\n" + HEAD + rows("ball", level=20))
    words = "--with", "xqc.csv", "--note", "ten episodes, no exploration", "--json"
    found = by_name(printed("compare", *words))
    assert found["a"]["score"] == "evaluated"
    assert found["a"]["mean"] == 12
    assert found["xqc"]["mean"] == pytest.approx(20.1)
    assert "measured by them: ten episodes, no exploration." in found["xqc"]["note"]


def test_compare_accepts_several_published_files_with_columns_in_any_order(root, printed):
    Path("one.csv").write_text(HEAD + rows())
    Path("two.csv").write_text("# note: x\n\nvalue, Step,SEED,environment\n7,1000,4,Ball\n")
    found = by_name(printed("compare", "--with", "one.csv", "--with", "two.csv", "--json"))
    assert (found["two"]["mean"], found["two"]["seeds"]) == (7, 1)
    assert "one" in found


def test_published_file_may_name_its_environment_by_a_gymnasium_id(root, printed):
    params_of(root, sections=GYM, hopper={"environment": "hop"}, behavior="Hopper")
    left(root, "evaluate", "hopper/seed1", metrics={"Hopper": {"mean_return": 1.0}})
    left(root, "train", "hopper/seed1", progress="Hopper,1000,2\n")
    Path("zoo.csv").write_text(HEAD + rows("Hopper-v4"))
    found = by_name(printed("compare", "--with", "zoo.csv", "--json"))
    assert found["zoo"]["behavior"] == "Hopper"


def test_report_shows_learning_curves_and_the_note_of_a_published_file(root, printed):
    Path("cleanrl.csv").write_text(HEAD + rows())
    printed_text = printed("compare", "--with", "cleanrl.csv", "-o", "pages")
    assert "Wrote pages/report.html." in printed_text
    page = Path("pages/report.md").read_text()
    note = "Other people's results, measured by them: CleanRL's training returns."
    assert f"**cleanrl**: seeds 0, 1, 2. {note}" in page
    assert "cleanrl,3,1000," in Path("pages/learning.csv").read_text()
    html = Path("pages/report.html").read_text()
    assert "<title>cleanrl, seed 1</title>" in html
    assert "../train" not in html
    assert not Path("results/report").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "p.csv: does not say how its values were measured; add a line `# note: TEXT`"),
        ("# note: x\n", "p.csv: needs the columns environment, seed, step, value, has no line"),
        (
            "# note: x\nenv_id,seed,global_step,episodic_return\n",
            "has env_id, seed, global_step, episodic_return; rename env_id to environment, "
            "global_step to step, episodic_return to value",
        ),
        (HEAD.replace(",value", ""), "has environment, seed, step"),
        (HEAD, "p.csv: has no rows below its header"),
        (f"{HEAD}Ball,1,1000\n", "p.csv:3: Ball,1,1000: needs a name, a seed from 0, and two"),
        (f"{HEAD}Ball,1,1000,2,3\n", "p.csv:3: Ball,1,1000,2,3: needs a name"),
        (f"{HEAD}Ball,-1,1000,2\n", "p.csv:3: Ball,-1,1000,2: needs a name"),
        (f"{HEAD}Ball,1,1e3,nan\n", "p.csv:3: Ball,1,1e3,nan: needs a name"),
        (f"{HEAD}Ball,1,many,2\n", "p.csv:3: Ball,1,many,2: needs a name"),
        (f"{HEAD},1,1000,2\n", "p.csv:3: ,1,1000,2: needs a name"),
        (f"{HEAD}Ball,1,5,2\nBall,1,5,2\n", "p.csv:4: repeats step 5 of seed 1 of Ball; keep one"),
        (
            f"{HEAD}Ant,1,5,2\n",
            "p.csv: has Ant, but the experiments here have Ball, ball; write",
        ),
        (f"# returns: test\n{HEAD}", "# returns: 'test' is not allowed. Allowed: training, eval"),
    ],
)
def test_published_file_that_cannot_be_used_is_refused_in_one_line(text, message, root, refused):
    Path("p.csv").write_text(text)
    assert message in refused("compare", "--with", "p.csv")


def test_compare_refuses_a_file_named_like_an_experiment_and_contradicting_options(root, refused):
    Path("a.csv").write_text(HEAD + rows())
    assert refused("compare", "--with", "a.csv") == (
        "a.csv: its results would have the name of the experiment a; rename the file"
    )
    assert refused("compare", "--note", "x") == "--note belongs to --with FILE, which is not given"
    assert "gone.csv: cannot be read as CSV" in refused("compare", "--with", "gone.csv")
    Path("binary.csv").write_bytes(b"\xff\xfe")
    assert "binary.csv: cannot be read as CSV" in refused("compare", "--with", "binary.csv")
    line = refused("compare", "results/train/a", "-o", "pages")
    assert line == "--output writes the report of params.yaml's experiments; give no RUN"
    Path("pages").mkdir()
    Path("pages/mine").touch()
    assert "pages: exists and is not empty" in refused("compare", "-o", "pages")


def test_published_file_must_name_a_behavior_of_an_environment_with_several(root, refused):
    for seed in (1, 2, 3):
        both = {name: {"mean_return": 1.0} for name in ("Ball", "Bat")}
        left(root, "evaluate", f"a/seed{seed}", metrics=both)
    Path("p.csv").write_text(HEAD + rows("ball"))
    line = "p.csv: ball has several behaviors; write one of Ball, Bat into the column environment"
    assert refused("compare", "--with", "p.csv") == line
