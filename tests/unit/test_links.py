"""Links between the pages of the project: to files, to headings, and by the name of the page."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *ROOT.glob("*.md"),
    *(
        page
        for name in ("docs", "config", "examples", "packages")
        for page in ROOT.glob(f"{name}/**/*.md")
    ),
]
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")
SOURCE = re.compile(r"()(?:src|href)=\"([^\"]+)\"")


def prose(page: Path) -> str:
    """Return a page's text without its blocks of code."""
    return re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def headings(page: Path) -> set[str]:
    """Return the anchors of a page's headings, which follow `#` in a link."""
    found = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    plain = (re.sub(r"[`*]|\]\([^)]*\)", "", heading).lower().strip() for heading in found)
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


def broken(page: Path) -> list[str]:
    """Return the faults of a page's relative links."""
    wrong = []
    for text, target in [*LINK.findall(prose(page)), *SOURCE.findall(prose(page))]:
        if re.match(r"[a-z]+:", target):
            continue
        name, _, heading = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        if not path.exists():
            wrong.append(f"{target}: there is no such file")
        elif heading and path.suffix == ".md" and heading not in headings(path):
            wrong.append(f"{target}: there is no such heading")
        elif re.fullmatch(r"[\w./-]+\.md", text) and not str(path).endswith(text.lstrip("./")):
            wrong.append(f"{target}: is called {text}")
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page_have_existing_targets(page: Path):
    assert broken(page) == []


def test_broken_links_are_detected(tmp_path: Path):
    (tmp_path / "b.md").write_text("# The `second` page\n")
    page = tmp_path / "a.md"
    page.write_text(
        "[x](b.md) [x](b.md#the-second-page) [docs/b.md](b.md) [c](c.md) [x](b.md#other) "
        '[web](https://a.example/c) <img src="no.png">\n```\n[code](c.md)\n```\n'
    )
    assert broken(page) == [
        "b.md: is called docs/b.md",
        "c.md: there is no such file",
        "b.md#other: there is no such heading",
        "no.png: there is no such file",
    ]
    assert len(PAGES) > 50
    assert sum(len(LINK.findall(prose(page))) for page in PAGES) > 100
