"""The number of torch operations of a gradient step, which sets the speed of small networks."""

from collections import Counter

import pytest
from golden_training import Training
from torch.utils._python_dispatch import TorchDispatchMode  # no public way counts backward passes

MOST = {"ppo, continuous": 116, "sac, continuous": 263, "poca, discrete": 495}
"""Operations of a gradient step with its backward pass and Adam, views included. It was
148, 326 and 503 before layers of one shape were computed together, and clip ranges once."""


class Counted(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, operation, _types, args=(), kwargs=None):
        self.calls[str(operation)] += 1
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", MOST)
def test_a_gradient_step_takes_at_most_the_stored_number_of_operations(name, tmp_path, monkeypatch):
    training = Training(name, tmp_path)
    counts = []
    learn = type(training.learner.algorithm).learn_minibatch

    def counted(*args, **kwargs):
        with Counted() as mode:
            result = learn(*args, **kwargs)
        counts.append(mode.calls)
        return result

    monkeypatch.setattr(type(training.learner.algorithm), "learn_minibatch", counted)
    training.run()
    least = min(counts, key=Counter.total)
    assert least.total() <= MOST[name], "\n".join(f"{n:4} {op}" for op, n in least.most_common())
