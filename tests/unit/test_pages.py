"""Pages of the documentation: their length, and what they say about the code."""

import importlib
import importlib.util
import re
from operator import attrgetter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
EXPLANATIONS = sorted((ROOT / "docs/explanation").glob("*.md"))
_spec = importlib.util.spec_from_file_location("rooms", ROOT / "docs/tools/rooms.py")
rooms = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(rooms)
MOST_WORDS = 1200
"""Most words of an explanation, without blocks of code and tables."""
NAME_IN_FILE = re.compile(r"`([\w.]+)` in `([\w/]+)\.py`")


def words(markdown: str) -> int:
    """Count words as `wc -w` does, without blocks of code and rows of tables."""
    text = re.sub(r"^```.*?^```$", "", markdown, flags=re.MULTILINE | re.DOTALL)
    return len(re.sub(r"^\|.*$", "", text, flags=re.MULTILINE).split())


@pytest.mark.parametrize("page", EXPLANATIONS, ids=lambda page: page.stem)
def test_explanation_page_has_at_most_1200_words(page: Path):
    assert words(page.read_text("utf-8")) <= MOST_WORDS


def test_word_count_of_a_page_excludes_code_and_tables():
    assert words("# A title\n\nTwo words.\n```\nx = 1\n```\n| a | b |\n|---|---|\n") == 5


def test_names_in_the_guide_to_the_ppo_source_exist_in_the_code():
    page = (ROOT / "docs/explanation/reading-ppo.md").read_text("utf-8")
    places = NAME_IN_FILE.findall(page)
    assert len(places) > 50
    for name, path in places:
        module = importlib.import_module(f"pipeline.{path.replace('/', '.')}")
        assert attrgetter(name)(module) is not None, f"{path}.py has no {name}"
    files = re.findall(r"`([\w/]+\.py)`", page.replace("`src/pipeline/", "`"))
    assert [path for path in files if not (ROOT / "src/pipeline" / path).is_file()] == []


def test_architecture_page_agrees_with_the_imports():
    assert rooms.PAGE.read_text("utf-8") == rooms.page(), "run `python docs/tools/rooms.py`"


def test_architecture_drawing_leaves_out_only_implied_arrows():
    found = {("a", "b"): 1, ("b", "c"): 2, ("a", "c"): 3, ("d", "c"): 4}
    assert rooms.in_order(found).index("a") < rooms.in_order(found).index("b")
    assert rooms.direct(found) == [("a", "b"), ("b", "c"), ("d", "c")]


def test_documentation_index_lists_every_page():
    index = DOCS / "README.md"
    targets = re.findall(r"\]\(([\w/-]+\.md)", index.read_text("utf-8"))
    pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")} - {index.name}
    assert pages - set(targets) == set()
