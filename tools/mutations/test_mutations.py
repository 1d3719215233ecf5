from __future__ import annotations

import ast
import subprocess
import sys

import pytest
import yaml
from changes import mutations_of, sample

SOURCE = '''
"""A docstring."""
import logging
from typing import TYPE_CHECKING

_log = logging.getLogger(__name__)
if TYPE_CHECKING:
    from other import Thing


def loss(policy: Thing, entropy, *, beta: float = 0.5):
    """Not a mutation: 1 + 1."""
    _log.info("%s", 1 + 1)
    if beta < 0 and entropy is not None:
        raise ValueError(f"{beta + 1}")
    policy.total += 1
    return policy.mean(axis=1).clamp_min(0) - beta * entropy[1:n]
'''


def texts(source, kind=None):
    return {
        mutation.text for mutation in mutations_of("a.py", source) if kind in {None, mutation.kind}
    }


@pytest.mark.parametrize(
    ("statement", "kind", "expected"),
    [
        ("x = a - b", "operator", {"x = a - b -> x = a + b"}),
        ("x += a", "operator", {"x += a -> x -= a"}),
        ("x = -a", "sign", {"x = -a -> x = a"}),
        ("x = not a", "sign", {"x = not a -> x = a"}),
        ("x = a < b", "comparison", {"x = a < b -> x = a <= b"}),
        ("x = 3", "constant", {"x = 3 -> x = 4", "x = 3 -> x = 0"}),
        ("x = True", "constant", {"x = True -> x = False"}),
        ("x = a[b:]", "slice", {"x = a[b:] -> x = a[b + 1:]"}),
        ("f(x)", "statement left out", {"f(x) -> pass"}),
        ("self.x = a", "statement left out", {"self.x = a -> pass"}),
        ("if a:\n    pass", "condition", {"if a -> if True", "if a -> if False"}),
        ("x = min(a, b)", "call", {"x = min(a, b) -> x = max(a, b)", "x = min(a, b) -> x = a"}),
        ("x = a.sum(1).exp()", "call", None),
        ("x = f(a, b)", "argument", {"x = f(a, b) -> x = f(a)"}),
        ("x = f(a, b=c)", "argument", {"x = f(a, b=c) -> x = f(a)"}),
        ("def f():\n    return a", "return value", {"return a -> return None"}),
    ],
)
def test_each_kind_of_mistake_is_made(statement, kind, expected):
    if expected is None:
        expected = {
            "x = a.sum(1).exp() -> x = a.sum(1)",
            "x = a.sum(1).exp() -> x = a.exp()",
            "x = a.sum(1).exp() -> x = a.mean(1).exp()",
        }
    assert texts(statement, kind) == expected


def test_texts_types_and_logs_stay_as_they_are():
    assert not texts(SOURCE.partition("def loss")[0])
    for text in texts(SOURCE):
        assert "_log" not in text
        assert "ValueError" not in text
        assert "docstring" not in text


def test_a_mutation_changes_what_it_says_and_nothing_else():
    for mutation in mutations_of("a.py", SOURCE):
        changed = ast.unparse(mutation.apply(SOURCE)).splitlines()
        before = ast.unparse(ast.parse(SOURCE)).splitlines()
        assert sum(a != b for a, b in zip(before, changed, strict=True)) == 1
    [candidate] = [
        candidate
        for candidate in mutations_of("a.py", SOURCE)
        if "mean(axis=1) - beta" in candidate.text
    ]
    assert "policy.mean(axis=1) - beta * entropy[1:n]" in ast.unparse(candidate.apply(SOURCE))


def test_a_sample_repeats_has_every_kind_and_keeps_to_itself_when_other_lines_change():
    mutations = mutations_of("a.py", SOURCE)
    chosen = [mutation.key for mutation in sample(mutations, 9, 0)]
    assert chosen == [mutation.key for mutation in sample(mutations[::-1], 9, 0)]
    assert len({mutation.kind for mutation in sample(mutations, 9, 0)}) >= 8
    assert chosen != [mutation.key for mutation in sample(mutations, 9, 1)]
    longer = mutations_of("a.py", "first = 1\n\n\n" + SOURCE)
    assert len({mutation.key for mutation in sample(longer, 9, 0)} & set(chosen)) >= 8


@pytest.mark.slow
def test_package_is_mutated_and_the_share_that_is_caught_is_stated(request):
    completed = subprocess.run(  # noqa: S603  # our own program
        [
            *(sys.executable, "tools/mutations", "--package", "nets"),
            *("--module", "layers.py", "--sample", "12"),
            *(
                "--tests",
                *(f"tests/unit/nets/test_{name}.py" for name in ("nets", "heads", "dense")),
            ),
        ],
        cwd=request.config.rootpath,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert completed.returncode in {0, 1}, completed.stderr
    row = [cell.strip() for cell in completed.stdout.splitlines()[-1].strip("|").split("|")]
    assert row[:2] == ["nets", "12"]
    assert int(row[2]) >= 6
    survivors = [line for line in completed.stdout.splitlines() if line.startswith("src/")]
    assert len(survivors) == int(row[5])


def test_every_mistake_that_needs_no_test_still_exists_and_has_a_reason(request):
    root = request.config.rootpath
    listed = yaml.safe_load((root / "tools/mutations/equivalent.yaml").read_text())
    mutation_texts = {
        name: {mutation.text for mutation in mutations_of(name, (root / name).read_text("utf-8"))}
        for name in {entry["file"] for entry in listed}
    }
    for entry in listed:
        assert entry["mutation"] in mutation_texts[entry["file"]], entry
        assert entry["reason"]
