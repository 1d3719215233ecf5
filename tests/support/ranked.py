"""One of two learner processes: `python ranked.py RANK STORE` prints its results as JSON."""

import json
import sys

import numpy as np
import torch
from torch.distributed import FileStore

from pipeline.algos.ppo import PPO
from pipeline.algos.rows import Rows
from pipeline.core.specs import ActionSpec, BehaviorSpec, ObservationSpec
from pipeline.data.rollout import Rollout
from pipeline.errors import LearnerLostError
from pipeline.nets.layers import RunningNormalizer
from pipeline.settings import load_run_settings
from pipeline.trainer.distributed.group import DistributedGroup, SharedNormalizers, report_failure

SIZE = 2
CPU = torch.device("cpu")
ROWS = {0: 5, 1: 9}
"""Number of rows of each process, in tests with different numbers."""
SPEC = BehaviorSpec([ObservationSpec((3,), (), 0, "a")], ActionSpec(2, ()))


def rows(rank: int, round_: int = 0) -> np.ndarray:
    rng = np.random.default_rng([rank, round_])
    # The second column is far from 0, where a variance loses digits.
    return rng.normal([3.0, 1e4], 2.0 + rank, size=(ROWS[rank], 2)).astype(np.float32)


def half(rank: int) -> Rollout:
    """Return a process's rollout: 48 rows for rank 0, 80 for rank 1."""
    n_rows = 48 + 32 * rank
    rng = np.random.default_rng(10 + rank)
    lengths = np.full(n_rows // 16, 16)
    return Rollout(
        obs=[rng.normal(size=(n_rows, 3)).astype(np.float32)],
        fields={
            "continuous": rng.normal(size=(n_rows, 2)).astype(np.float32),
            "discrete": np.zeros((n_rows, 0), dtype=np.int64),
            "log_prob": np.full((n_rows, 2), -1.4, dtype=np.float32),
            "reward": rng.normal(rank, 1.0 + rank, size=n_rows).astype(np.float32),
        },
        starts=np.cumsum(lengths) - lengths,
        lengths=lengths,
        terminated=np.arange(len(lengths)) % 2 == 0,
        next_obs=[rng.normal(size=(len(lengths), 3)).astype(np.float32)],
    )


def ppo() -> PPO:
    behavior = {
        "trainer_type": "ppo",
        "hyperparameters": {"batch_size": 128, "buffer_size": 100, "clip_value": True},
        "network_settings": {"hidden_units": 8, "num_layers": 1},
    }
    run = load_run_settings(None, overrides={"behaviors": {"B": behavior}})
    return PPO(SPEC, run.behaviors["B"], seed=1, device=CPU)


def batch(n: int) -> Rows:
    column = torch.arange(float(n)).view(-1, 1)
    return Rows(obs=[column], fields={"value": column})


def found(ranks: DistributedGroup) -> dict:
    rank = ranks.rank
    gradient = torch.from_numpy(np.random.default_rng(rank).normal(size=1001).astype(np.float32))
    ranks.average_gradients_(gradient)
    local_rows = torch.from_numpy(rows(rank))
    normalizer = RunningNormalizer(2)
    shared = SharedNormalizers({"network": torch.nn.Sequential(normalizer)})
    for round_ in range(3):
        normalizer.update(torch.from_numpy(rows(rank, round_)))
        shared.merge(ranks)
    stream = np.random.default_rng(rank)
    sizes = [len(minibatch.obs[0]) for minibatch in batch(ROWS[rank]).minibatches(stream, 4, ranks)]
    means = []
    for minibatch in batch(ROWS[rank]).minibatches(stream, 14, ranks):
        mean = minibatch.obs[0].mean().view(1)
        ranks.average_gradients_(mean)
        means.append(mean.item())
    mean = torch.full((1,), float(rank))
    ranks.average_gradients_(mean)
    means.append(mean.item())
    algorithm = ppo()
    algorithm.learn_with(ranks)
    stats = algorithm.update(half(rank), step=100)
    return {
        "average": gradient.tolist(),
        "moments": ranks.moments(rows(rank)),
        "deviation": ranks.std(local_rows).tolist(),
        "least, most": [ranks.least(7 + rank), ranks.most(7 + rank)],
        "notes": ranks.all_gather_object({"rank": rank, "text": "x" * (100 * rank), "number": 0.1}),
        "normalizer": [
            normalizer.count.item(),
            *normalizer.mean.tolist(),
            *normalizer.squared.tolist(),
        ],
        "minibatches": sizes,
        "means": means,
        "weights": algorithm.optimizer.flat.tolist(),
        "losses": [stats["Losses/Policy Loss"], stats["Losses/Value Loss"]],
    }


def main() -> None:
    rank = int(sys.argv[1])
    torch.set_num_threads(1)
    store = FileStore(sys.argv[2], SIZE)
    ranks = DistributedGroup(store, rank=rank, size=SIZE, device=CPU)
    result = found(ranks)
    if rank == 1:
        report_failure(store, rank, "no luck")
    else:
        try:
            ranks.average_gradients_(torch.zeros(3))
        except LearnerLostError as error:
            result["lost"] = str(error)
    print(json.dumps(result))  # noqa: T201  # the test reads it


if __name__ == "__main__":
    main()
