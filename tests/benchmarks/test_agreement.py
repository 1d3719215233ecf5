"""Our half of benchmarks/agreement.py, which needs no ML-Agents."""

from __future__ import annotations

import agreement
import agreement_ours
import pytest


@pytest.mark.parametrize("case", agreement.CASES)
def test_given_minibatches_move_every_network_that_learns_and_the_same_way_each_time(case):
    kind, actions = agreement.CASES[case]
    data = agreement.minibatches(kind, actions, 2)
    results = []
    for _ in range(2):
        ours = agreement_ours.learner(kind, actions)
        before = agreement.weights(ours.networks)
        for number in range(2):
            ours.learn({name: values[number] for name, values in data.items()})
        results.append(agreement.weights(ours.networks))
    for name, first in results[0].items():
        moved = agreement.distance(first, before[name])
        assert (moved > 1e-6) == ((kind, name) != ("rnd", "target")), name
        assert agreement.distance(first, results[1][name]) == 0.0, name


def test_a_difference_is_more_than_rounding_and_ends_with_1(monkeypatch):
    def shifted(kind, actions, before, data):
        return {name: [one + 1e-3 for one in some] for name, some in before.items()}

    monkeypatch.setattr(agreement, "peer_weights", shifted)
    monkeypatch.setattr("sys.argv", ["agreement.py", "--case", "gail", "--updates", "2"])
    assert agreement.main() == 1
