"""The parts of benchmarks/agreement.py that need no ML-Agents."""

import agreement
import numpy as np


def shifted(training, before, draws, folder):
    return {name: [values + 1e-3 for values in arrays] for name, arrays in before.items()}


def run(monkeypatch, *options):
    monkeypatch.setattr("sys.argv", ["agreement.py", *options])
    return agreement.main()


def test_weights_that_differ_by_more_than_rounding_from_the_reference_give_exit_code_1(monkeypatch):
    monkeypatch.setattr(agreement, "peer_weights", shifted)
    assert run(monkeypatch, "--case", "ppo, gail", "--rollouts", "1") == 1


def test_reference_implementation_receives_the_random_numbers_of_our_update(monkeypatch):
    draws = {}

    def noted(training, before, drawn, folder):
        draws.update(drawn)
        return training.weights()

    monkeypatch.setattr(agreement, "peer_weights", noted)
    assert run(monkeypatch, "--case", "sac, curiosity and gail", "--rollouts", "1") == 0
    assert {name: len(arrays) > 0 for name, arrays in draws.items()} == {
        "shuffles": False, "integers": True, "normal": True, "uniform": True,
    }  # fmt: skip
    assert run(monkeypatch, "--case", "ppo, cloning, discrete", "--rollouts", "1") == 0
    assert [len(order) for order in draws["shuffles"]] == [48, 48, 24, 24]


def test_golden_file_of_a_case_that_differs_from_mlagents_on_purpose_has_no_mlagents_weights(
    monkeypatch, tmp_path
):
    monkeypatch.setattr(agreement, "peer_weights", None)
    monkeypatch.setattr(agreement, "GOLDEN", tmp_path)
    assert run(monkeypatch, "--case", "sac, hybrid", "--rollouts", "1") == 0
    assert list(tmp_path.iterdir()) == []
    assert run(monkeypatch, "--case", "sac, hybrid", "--golden") == 0
    with np.load(tmp_path / "sac_hybrid.npz") as content:
        assert {name.partition("/")[0] for name in content.files} == {"made_by", "before", "ours"}
