"""Every command of README and tutorials runs, here or in the test that `ELSEWHERE` names."""

import ast
import re
import shutil
from pathlib import Path

import pytest
from project import ROOT, copy_project, run

TUTORIALS = sorted((ROOT / "docs/tutorials").glob("*.md"))
COMING = sorted((ROOT / "docs/how-to").glob("coming-from-*.md"))
PAGES = [ROOT / "README.md", *TUTORIALS, *COMING]
PROGRAM = re.compile(
    r"(pipeline|python|make|git|dvc|snakemake|pip|source|cd|sed|tensorboard|build/\w+) "
)
ELSEWHERE = {
    "git clone URL rl-pipeline && cd rl-pipeline": "every test of tests/workflow works in a copy",
    "make install": "what CI begins with",
    "source .venv/bin/activate": "what CI begins with",
    "pipeline run --cores 2": "tests/workflow/test_engines.py and test_project_of_the_wheel.py",
    "pip install 'rl-pipeline[slurm]' -c constraints.txt": "an index is asked; `snakemake --profile"
    " profiles/slurm` needs it",
    "snakemake --profile profiles/slurm": "tests/workflow/test_clusters.py, where it is installed",
    "python benchmarks/throughput.py --rounds 5": "needs `make peer`",
    "python benchmarks/throughput.py --rounds 5 --steps 120000 --compile --threaded": "the same",
    "python benchmarks/learning.py --case ppo": "needs `make peer`",
    "python benchmarks/learning.py --case sac --seeds {1..16}": "needs `make peer`",
    "python benchmarks/cluster_jobs.py --jobs 64 --kill 10 --at-once 4": "test_clusters.py",
    "pipeline ui": "tests/unit/cli: it serves until it is ended",
    "tensorboard --logdir results": "not ours: it serves until it is ended",
    "pipeline sync": "tests/workflow/test_whole_graph.py",
    "pipeline compare": "tests/workflow/test_whole_graph.py",
    "pipeline doctor": "tests/unit/cli: whether it is content depends on the machine",
    "pipeline learn own.yaml --env docking:Docking --run-id docking --seed 1": "tests/unit/"
    "test_example_environments.py",
    "pipeline learn own.yaml --env rooms:Rooms --run-id rooms --seed 1": "the same",
    "cd my_game": "a step into the folder that the line before has made",
    "pipeline evaluate results/export/grid_world_ppo/seed1/GridWorld.onnx --env grid_world "
    "--episodes 10 --video grid.gif": "needs `pipeline run`; the README's has a video, too",
}
"""Commands that no test of this file runs, and why."""


def commands(page: Path) -> list[str]:
    """Return the commands in a page's blocks without a language, without comments."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    lines = [line for language, text in blocks if not language for line in text.splitlines()]
    return [
        command_line.partition("  #")[0].strip()
        for command_line in lines
        if PROGRAM.match(command_line)
    ]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the project with short trainings and the files of the examples."""
    root = copy_project(tmp_path / "project")
    shutil.copytree(ROOT / "examples", root / "examples")
    for path in (ROOT / "examples/environments").iterdir():
        if path.is_file():
            shutil.copy(path, root)
    for path in [*root.glob("config/**/*.yaml"), *root.glob("**/imitate.yaml"), root / "own.yaml"]:
        text = path.read_text()
        for key, value in (("max_steps", 1200), ("summary_freq", 600), ("buffer_size", 512)):
            text = re.sub(rf"\b{key}: \S+", f"{key}: {value}", text)
        path.write_text(re.sub(r"\bbatch_size: \S+", "batch_size: 128", text))
    return root


def here(page: Path) -> list[str]:
    return [command for command in commands(page) if command not in ELSEWHERE]


def test_every_command_that_this_test_file_leaves_out_is_on_a_documentation_page():
    everything = {command for page in PAGES for command in commands(page)}
    assert set(ELSEWHERE) <= everything
    assert len(everything - set(ELSEWHERE)) > 20


def test_readme_has_at_most_1100_words():
    assert len((ROOT / "README.md").read_text().split()) <= 1100


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_documented_command_works(page: Path, checkout: Path):
    cache = str(checkout / "cache")
    for command in here(page):
        short = re.sub(r"--episodes \d+", "--episodes 2", command)
        if short.startswith("pipeline evaluate") and "--episodes" not in short:
            short += " --episodes 2"
        short = short.replace("--min-return 400", "--min-return 10").replace("KEY=VALUE", "")
        run(checkout, "bash", "-c", short, PIPELINE_CACHE=cache)


@pytest.mark.slow
def test_python_example_for_stable_baselines3_users_works(tmp_path: Path):
    (page,) = [page for page in COMING if "stable" in page.stem]
    code = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    assert len(code) == 1
    short = code[0].replace("50_000", "1_200").replace("episodes=20", "episodes=2")
    printed = run(tmp_path, "python", "-c", short + "print(action in (0, 1))").stdout
    mean, is_action = printed.splitlines()[-2:]
    assert float(mean) >= 8  # no episode of CartPole is shorter
    assert is_action == "True"


def test_every_message_of_the_troubleshooting_page_is_in_the_source_code():
    texts = []
    for path in (ROOT / "src/pipeline").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value for part in node.values if isinstance(part, ast.Constant)]
                texts.append("\0".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    everything = "\n".join(texts)
    page = (ROOT / "docs/how-to/troubleshooting.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    quoted = [quote for row in rows for quote in re.findall(r"`([^`]+)`", row)]
    messages = [quote for quote in quoted if " " in quote and not quote.startswith(("--", "pip"))]
    assert len(messages) > 10
    assert [message for message in messages if message not in everything] == []
