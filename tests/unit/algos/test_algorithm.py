"""What all algorithms do alike."""

from __future__ import annotations

import torch

from pipeline.algos.algorithm import load_matching


def test_weights_that_fit_are_taken_over_and_each_that_does_not_is_named_with_its_reason():
    ours = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 3), "b": torch.nn.Linear(3, 1)})
    theirs = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 3), "b": torch.nn.Linear(4, 1)})
    saved = theirs.state_dict()
    del saved["b.bias"]
    saved["c.bias"] = torch.ones(1)
    kept = ours["b"].bias.clone()
    left, n_loaded = load_matching(
        {"policy": ours, "critic": torch.nn.Linear(1, 1)}, {"policy": saved, "critic": None}
    )
    assert left == [
        "policy.b.weight (1x4 there, 1x3 here)",
        "policy.b.bias (not in the checkpoint)",
        "policy.c.bias (unknown here)",
    ]
    assert n_loaded == 2
    assert torch.equal(ours["a"].weight, theirs["a"].weight)
    assert torch.equal(ours["a"].bias, theirs["a"].bias)
    assert torch.equal(ours["b"].bias, kept)
