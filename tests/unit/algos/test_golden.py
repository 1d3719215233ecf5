"""Weights after short trainings equal stored weights of ML-Agents 1.1.0 and of this project.

A file in golden/ has a sample of the weights of a case in tests/support/golden_cases.py: before
training, after three updates of this project, and after three updates of the reference, unless the
reference differs on purpose. `python benchmarks/agreement.py --golden` writes the files again (it
needs `make peer`). This project's weights may change only if the change of learning is intended.
"""

import logging
from pathlib import Path

import numpy as np
import pytest
from golden_cases import CASES, golden_file
from golden_training import Training, sampled

FOLDER = Path(__file__).parent / "golden"
ROUNDING = 1e-3
"""Largest difference of weights, as a share of their change: other processors and versions of
torch round in another way, and Adam divides small gradients by their own size."""
LEAST = 1e-6
"""Largest absolute difference, in addition, as of initial weights."""


COMPILED = (
    "ppo, hybrid",
    "ppo, values clipped",
    "sac, discrete",
    "sac, normalised",
    "xqc, hybrid",
    "xqc, crossq",
)


@pytest.mark.parametrize(
    ("name", "compiled"), [*((name, False) for name in CASES), *((name, True) for name in COMPILED)]
)
def test_three_updates_give_the_stored_weights(name, compiled, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    training = Training(name, tmp_path)
    if compiled:
        training.learner.algorithm.compile()
    before = sampled(training.weights())
    training.run()
    assert ("Compiled the gradient step" in caplog.text) == compiled
    after = sampled(training.weights())
    with np.load(FOLDER / golden_file(name)) as content:
        stored = {key: content[key] for key in content.files}
    for network, values in after.items():
        begun = stored[f"before/{network}"]
        np.testing.assert_allclose(before[network], begun, rtol=1e-5, atol=LEAST, err_msg=network)
        moved = np.abs(stored[f"ours/{network}"] - begun).max()
        assert (moved > 0) == (network != "rnd target")
        for source in ("ours",) if CASES[name].differs else ("ours", "theirs"):
            apart = np.abs(values - stored[f"{source}/{network}"]).max()
            assert apart <= ROUNDING * moved + LEAST, f"{source}, {network}: {apart} of {moved}"


def test_each_stored_file_belongs_to_a_case_and_names_the_command_that_made_the_file():
    assert {path.name for path in FOLDER.iterdir()} == {golden_file(name) for name in CASES}
    for name, case in CASES.items():
        with np.load(FOLDER / golden_file(name)) as content:
            made_by = str(content["made_by"])
            has_theirs = any(key.startswith("theirs/") for key in content.files)
        assert f"--golden --case '{name}'" in made_by
        assert "torch " in made_by
        assert ("mlagents 1.1.0" in made_by) == has_theirs == (not case.differs)
