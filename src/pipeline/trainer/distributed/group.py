"""Several processes that learn together, over `torch.distributed`.

Tensors on CPUs are exchanged with gloo, tensors on GPUs with NCCL. The processes average gradients
during an update, merge statistics before and after it, and exchange plain values where they
synchronise; see `distributed.sync`. They find each other, and report failures, through a key-value
store that `torchrun` or the first process serves.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore, Store

from pipeline.algos.process_group import ProcessGroup
from pipeline.core.arrays import AnyArray, FloatArray
from pipeline.errors import LearnerLostError
from pipeline.nets.layers import RunningNormalizer, imagined_mean, square_root
from pipeline.trainer.stopping import StopRequest

_log = logging.getLogger(__name__)

T = TypeVar("T")

# Seconds that a process waits for another process, which may be starting its environments again.
PATIENCE_S = 1800.0
# Seconds between two checks for signals and ended processes while waiting.
_POLL_S = 0.2
# Seconds to wait for the reason of a broken connection to appear in the store.
_REASON_S = 3.0
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Others(Protocol):
    """The processes that this process has started."""

    def forward_stop(self, signal_number: int) -> None:
        """Ask the processes to stop; a second call has no effect."""

    def ended(self) -> dict[int, str]:
        """Return a description of how each ended process ended, by rank."""


class DistributedGroup(ProcessGroup):
    """The processes of a run, as seen by one; LearnerLostError if another does not connect."""

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        size: int,
        device: torch.device,
        others: Others | None = None,
        stop: StopRequest | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self.others = others
        self.stop = stop or StopRequest()
        """Set when the first process asks this process to stop."""
        self._weight = 1.0
        # A connection that waits for a process serves no other request, so a second connection is
        # opened.
        self._store = _own_keys(store.clone())  # type: ignore[attr-defined]  # public, but not in the stubs
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        if os.environ.get("MASTER_ADDR", _LOOPBACK[0]) in _LOOPBACK and os.path.exists(  # noqa: PTH110  # no file
            "/sys/class/net/lo"
        ):
            # Without this variable, gloo would listen on the host's address, which other machines
            # may reach.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self._interruptible(
            lambda: dist.init_process_group(
                backend,
                store=PrefixStore("group", store),
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=PATIENCE_S),
            )
        )

    def minibatch_sizes(self, n: int, size: int) -> list[int]:
        """Return how many of this process's `n` rows each minibatch has, at least 1.

        `size` is the number of rows that a minibatch has in all processes together.
        """
        counts = self._numbers([n])[:, 0]
        ends = np.concatenate(([0], np.cumsum(counts)))
        total = int(ends[-1])
        size = min(size, total)
        # Each minibatch needs a row of each process: the all-reduce waits for all processes.
        n_minibatches = min(total // size, int(counts.min()))
        # Each process uses a share of its rows. The bounds of the shares are rounded, and not their
        # sizes, so that the sizes add up to `n_minibatches * size`.
        first, last = ends[self.rank : self.rank + 2] * (n_minibatches * size) // total
        n_rows = max(int(last - first), n_minibatches)
        cuts = n_rows * np.arange(n_minibatches + 1) // n_minibatches
        return [int(part) for part in np.diff(cuts)]

    def weighted(self, sizes: Sequence[int]) -> Iterator[None]:
        """Yield once per minibatch, in which this process has `sizes` rows, to weight gradients."""
        rows = self._numbers(sizes)
        # A weight is this process's number of rows divided by the mean over all processes.
        for weight in (rows[self.rank] * self.size / rows.sum(axis=0)).tolist():
            self._weight = weight
            yield
        self._weight = 1.0

    def least(self, n: int) -> int:
        """Return the smallest of the numbers `n` that the processes pass."""
        return self._reduced(n, dist.ReduceOp.MIN)

    def most(self, n: int) -> int:
        """Return the largest of the numbers `n` that the processes pass."""
        return self._reduced(n, dist.ReduceOp.MAX)

    def moments(self, values: FloatArray) -> tuple[float, float]:
        """Return mean and standard deviation of the values [R, ...] of all processes together."""
        # The moments are computed in float64, because sums over many float32 numbers lose digits.
        flat = torch.from_numpy(values.reshape(-1, 1)).to(torch.float64)
        mean, variance = self._merged_columns(flat)
        return float(mean[0]), float(square_root(variance)[0])

    def std(self, values: Tensor) -> Tensor:
        """Return the columns' standard deviations [S] over the values [R, S] of all processes."""
        _, variance = self._merged_columns(values.detach().to("cpu", torch.float64))
        return square_root(variance).to(values)

    def average_(self, means: Tensor, n_rows: int) -> None:
        """Replace means over this process's `n_rows` rows by means over all processes' rows."""
        for _ in self.weighted([n_rows]):
            self.average_gradients_(means)

    def average_gradients_(self, values: Tensor) -> None:
        """Replace `values` by their mean over all processes, with the weights set by `weighted`."""
        if self._weight != 1.0:
            values *= self._weight
        try:
            dist.all_reduce(values)
        except RuntimeError as error:
            raise self._lost_learner_error(error) from error
        # `values` is now the sum over the processes. The mean of their weights is 1, so the
        # quotient is the mean over all rows.
        values /= self.size

    def gathered(self, values: Tensor) -> list[Tensor]:
        """Return the `values` of each process by rank: tensors of the same shape, on the CPU."""
        result = [torch.empty_like(values) for _ in range(self.size)]
        self._interruptible(lambda: dist.all_gather(result, values))
        return result

    def all_gather_object(self, value: T, look: Callable[[], None] | None = None) -> list[T]:
        """Return the `value` of each process by rank; call `look` repeatedly while waiting."""
        result: list[T] = [value] * self.size
        self._interruptible(lambda: dist.all_gather_object(result, value), look)
        return result

    def gather_object(self, value: T) -> list[T]:
        """Return the `value` of each process by rank in the first process; [] in all others."""
        result: list[T] | None = [value] * self.size if self.rank == 0 else None
        self._interruptible(lambda: dist.gather_object(value, result, dst=0))
        return result or []

    def scatter_object(self, values: Sequence[T]) -> T:
        """Return this process's item of the first process's `values`."""
        result: list[Any] = [None]
        self._interruptible(lambda: dist.scatter_object_list(result, list(values) or None, src=0))
        item: T = result[0]
        return item

    def close(self) -> None:
        """Leave the group."""
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()

    def _reduced(self, n: int, operation: dist.ReduceOp.RedOpType) -> int:
        number = torch.tensor([n])
        self._interruptible(lambda: dist.all_reduce(number, operation))
        return int(number)

    def _numbers(self, numbers: Sequence[int]) -> AnyArray:
        """Return int64 [processes, n], the `numbers` [n] of each process."""
        parts = self.gathered(torch.tensor(numbers, dtype=torch.int64))
        stacked: AnyArray = torch.stack(parts).numpy()
        return stacked

    def _merged_columns(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the columns' mean and variance [S] over the values [R, S] of all processes."""
        n = torch.full((values.shape[1],), float(len(values)), dtype=torch.float64)
        mean = values.mean(0)
        # Deviations are from this process's mean; `merged` corrects them for the common mean.
        parts = self.gathered(torch.stack((n, mean, (values - mean).square().sum(0))))
        n, mean, squared = merged([part.unbind() for part in parts])
        return mean, squared / n

    def _interruptible(
        self, work: Callable[[], object], look: Callable[[], None] | None = None
    ) -> None:
        """Run `work`, which waits for other processes, in a thread; call `look` meanwhile."""
        failed: list[Exception] = []
        done = threading.Event()

        def wait() -> None:
            try:
                work()
            except Exception as error:  # noqa: BLE001  # raised below, in the thread that asked
                failed.append(error)
            done.set()

        # A thread waits, because torch's C++ code does not let Python's signal handlers run.
        threading.Thread(target=wait, name="ranks", daemon=True).start()
        while not done.wait(_POLL_S):
            if look is not None:
                look()
            # The exchange may have ended just before the process did.
            if self._ended() and not done.wait(_POLL_S):
                raise self._lost_learner_error(RuntimeError("its process has ended"))
        if failed:
            raise self._lost_learner_error(failed[0]) from failed[0]

    def _ended(self) -> dict[int, str]:
        return {} if self.others is None else self.others.ended()

    def _lost_learner_error(self, error: Exception) -> LearnerLostError:
        other_ranks = [rank for rank in range(self.size) if rank != self.rank]
        until = time.monotonic() + _REASON_S
        reasons: dict[int, str] = {}
        while not reasons and time.monotonic() < until:
            reasons = self._failures(other_ranks) or self._ended()
            if not reasons:
                time.sleep(_POLL_S)
        # A process's own message may come late, and says more than its exit code.
        reasons = self._failures(other_ranks) or reasons
        if not reasons:
            line = " ".join(str(error).split())[:200]
            names = " or ".join(map(str, other_ranks))
            return LearnerLostError(
                f"the learner of rank {names} (of {self.size}) no longer answers ({line}); see the "
                "last lines of its output, which the launcher prints"
            )
        rank = min(reasons)
        return LearnerLostError(f"the learner of rank {rank} (of {self.size}) {reasons[rank]}")

    def _failures(self, ranks: Sequence[int]) -> dict[int, str]:
        failures = {}
        with contextlib.suppress(RuntimeError):
            for rank in ranks:
                if self._store.check([f"failed/{rank}"]):
                    failures[rank] = f"has failed: {self._store.get(f'failed/{rank}').decode()}"
        return failures


def report_failure(store: Store, rank: int, message: str) -> None:
    """Store the error of this process for the processes that wait for it."""
    with contextlib.suppress(RuntimeError):  # the process that serves the store may have ended
        _own_keys(store).set(f"failed/{rank}", message)


def _own_keys(store: Store) -> PrefixStore:
    return PrefixStore("pipeline", store)


def merged(parts: Sequence[Sequence[Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    """Return count, mean and sum of squared deviations of the union of several samples.

    Each part has these of one sample, float64 [S] each. Source: Chan, Golub and LeVeque 1979,
    "Updating formulae and a pairwise algorithm for computing sample variances".
    """
    n, mean, squared = parts[0]
    for n_more, mean_more, squared_more in parts[1:]:
        n_both = n + n_more
        share = n_more / n_both.clamp_min(1.0)  # the share is 0 for two empty samples
        apart = mean_more - mean
        mean = mean + apart * share
        squared = squared + squared_more + apart.square() * n * share
        n = n_both
    return n, mean, squared


class SharedNormalizers:
    """Keeps the running normalizers of a behavior's networks the same in all processes.

    Between two synchronisations each process adds its own observations to its copy of the common
    state; a synchronisation adds the observations of all processes to the common state.
    """

    def __init__(self, networks: Mapping[str, nn.Module]) -> None:
        normalizers = [
            module
            for network in networks.values()
            for module in network.modules()
            if isinstance(module, RunningNormalizer)
        ]
        self._normalizers = list(dict.fromkeys(normalizers))
        self._before = [_state(normalizer) for normalizer in self._normalizers]

    def agreed(self) -> list[Tensor]:
        """Return the normalizers' common state after the last merge."""
        return [part for state in self._before for part in state]

    @torch.no_grad()
    def merge(self, group: DistributedGroup) -> None:
        """Add to the common state the observations of all processes since the last merge."""
        for normalizer, before in zip(self._normalizers, self._before, strict=True):
            device = normalizer.mean.device
            n_before, mean_before, squared_before = before
            # A new normalizer counts one imagined row, which differs between processes. The first
            # merge removes this row from every process's sample.
            is_first = bool((n_before == 1.0).all())
            own_mean = normalizer.imagined.cpu() if is_first else mean_before
            state = n_before, own_mean, squared_before
            new_sample = torch.stack(_without(_state(normalizer), state))
            samples = [part.unbind() for part in group.gathered(new_sample)]
            if is_first:
                mean_before = imagined_mean(*merged(samples))
            # All processes merge in the order of ranks, because rounding depends on the order.
            n, mean, squared = merged([(n_before, mean_before, squared_before), *samples])
            normalizer.count.copy_(n[0])
            normalizer.mean.copy_(mean.to(device))
            normalizer.squared.copy_(squared.to(device))
            normalizer.forget_scale()
        self._before = [_state(normalizer) for normalizer in self._normalizers]


def _state(normalizer: RunningNormalizer) -> tuple[Tensor, Tensor, Tensor]:
    """Return copies of a normalizer's count, mean and squared deviations, on the CPU."""
    count, mean, squared = (
        part.detach().cpu() for part in (normalizer.count, normalizer.mean, normalizer.squared)
    )
    # `merged` needs a count for each column; the normalizer has one count for all columns.
    return count.expand_as(mean).clone(), mean.clone(), squared.clone()


def _without(
    state: tuple[Tensor, Tensor, Tensor], before: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sample that, merged with the sample `before`, gives `state`: `merged` inverted."""
    n, mean, squared = state
    n_before, mean_before, squared_before = before
    n_new = n - n_before
    apart = (mean - mean_before) * n / n_new.clamp_min(1.0)  # the difference is 0 without new rows
    # Rounding could make the squared deviations negative.
    rest = squared - squared_before - apart.square() * n_before * n_new / n
    return n_new, mean_before + apart, rest.clamp_min(0.0)
