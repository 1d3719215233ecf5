"""The members of our classes, as benchmarks/peer_names.py counts them."""

import ast

import peer_names

THEIRS = """
class Wrapper:
    def action_spaces(self): ...
    def agents(self): ...
    def close(self): ...
"""


class Foreign:
    """Like PettingZoo's classes: annotates and reads `action_spaces`, but never sets it."""

    action_spaces: dict

    def action_space(self, agent):
        return self.action_spaces[agent]


class Ours(Foreign):
    def __init__(self):
        self.agents, self.number = [], 0

    def close(self): ...


def test_annotated_attribute_counts_as_a_member_only_if_one_of_our_own_classes_annotates_it():
    (node,) = ast.parse(THEIRS).body
    assert list(peer_names.absent(node, Ours)) == ["action_spaces"]
    own = {"__module__": "pipeline.mine", "__annotations__": {"action_spaces": "dict"}}
    assert list(peer_names.absent(node, type("Fields", (Ours,), own))) == []
