from __future__ import annotations

import pytest

from pipeline.stages import report


@pytest.mark.parametrize("text", ["pong-Pong", "CartPole-v1-CartPole-v1", "a.b_c-D"])
def test_figures_of_ordinary_names_are_named_after_them(text):
    assert report._file_name(text) == text


def test_no_two_names_have_the_same_figures():
    texts = ["a b", "a_b", "a/b", "a~20~b", "a~b", "ä b", "../a", ""]
    names = [report._file_name(text) for text in texts]
    assert len(set(names)) == len(texts)
    assert not any(set(name) & set("/\\%#? ") for name in names)
