"""The processes of a run with several learners, started by `torchrun` or by the first process.

The first process is the one in which the user called `train`. It starts the other processes, sends
them the job, and ends them: a started process ends when the pipe at its standard input is closed. A
started process writes only a log, `learner-<rank>.log`.
"""

import contextlib
import ctypes
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not listed
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from pipeline.algos.process_group import launched
from pipeline.errors import Interrupted, LearnerLostError, PipelineError, SettingsError, one_line
from pipeline.trainer.distributed.group import PATIENCE_S, DistributedGroup, Others, report_failure
from pipeline.trainer.environment import JobSpec
from pipeline.trainer.stopping import StopRequest
from pipeline.trainer.supported import usable_device
from pipeline.version import __version__

_log = logging.getLogger(__name__)

_STARTED_HERE = "PIPELINE_LEARNER"
_PR_SET_PDEATHSIG = 1
# Seconds that a process gets to end by itself, after success and after a failure.
_GRACE_S = 15.0
_SHORT_GRACE_S = 2.0


class LocalWorkers:
    """The processes of ranks 1 to `n` on this machine, each with a log `learner-<rank>.log`."""

    def __init__(self, n: int, *, port: int, threads: int, log_folder: Path) -> None:
        self.log_folder = log_folder
        self._stop_sent = False
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        log_folder.mkdir(parents=True, exist_ok=True)
        # The processes import this source, even if another version is installed.
        source = str(Path(__file__).resolve().parents[3])
        kept = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        shared = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([source, *(path for path in kept if path != source)]),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(n + 1),
            "LOCAL_WORLD_SIZE": str(n + 1),
            # OpenMP reads this number only when the process starts.
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
            _STARTED_HERE: "1",
        }
        try:
            for rank in range(1, n + 1):
                with self.log_of(rank).open("wb") as log:
                    self._processes[rank] = subprocess.Popen(
                        [sys.executable, "-m", "pipeline.trainer.worker"],
                        env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                        # A worker ends when this pipe closes, even after a kill -9 of this process.
                        stdin=subprocess.PIPE,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,  # so that Ctrl-C reaches the first process only
                    )
        except BaseException:
            # The processes that have started would wait for the process that has not started.
            self.end(_SHORT_GRACE_S)
            raise

    def log_of(self, rank: int) -> Path:
        """Return the log file of a process."""
        return self.log_folder / f"learner-{rank}.log"

    def forward_stop(self, signal_number: int) -> None:
        """Ask all processes to stop; only the first call has an effect."""
        if self._stop_sent:
            return
        self._stop_sent = True
        for process in self._processes.values():
            with contextlib.suppress(OSError):  # the process may have ended already
                _input(process).write(f"{signal_number}\n".encode())
                _input(process).flush()

    def ended(self) -> dict[int, str]:
        """Return text on how each ended process ended, with the path of its log, by rank."""
        endings = {}
        for rank, process in self._processes.items():
            code = process.poll()
            if code is not None:
                ending = f"has ended with exit code {code}"
                if code < 0:
                    ending = f"was ended by {signal.Signals(-code).name}"
                    if code == -signal.SIGKILL:
                        ending += " (by a user, or by the system for lack of memory)"
                endings[rank] = f"{ending}; its log is {self.log_of(rank)}"
        return endings

    def end(self, grace_s: float) -> None:
        """End all processes; kill the processes that still run after `grace_s` seconds."""
        until = time.monotonic() + grace_s
        for process in self._processes.values():
            with contextlib.suppress(OSError):
                _input(process).close()
        for process in self._processes.values():
            try:
                # All processes share one time limit, because they end at the same time.
                process.wait(max(until - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextlib.contextmanager
def started(
    n_learners: int, *, device: torch.device, threads: int, log_folder: Path
) -> Iterator[DistributedGroup]:
    """Start the other processes; yield the group of all processes; then end the other processes."""
    # The bound socket is handed to the store, so that no other program can take the port.
    listener = socket.create_server(("127.0.0.1", 0))
    port = int(listener.getsockname()[1])
    store = TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        timeout=timedelta(seconds=PATIENCE_S),
        # The other processes are started after the store, so the store must not wait for them.
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    local_workers = LocalWorkers(n_learners - 1, port=port, threads=threads, log_folder=log_folder)
    grace_s = _SHORT_GRACE_S  # this short time is for an end after a failure
    try:
        with _member(
            store, rank=0, size=n_learners, device=device, local_workers=local_workers
        ) as group:
            try:
                yield group
                grace_s = _GRACE_S
            except Interrupted:
                grace_s = _GRACE_S
                raise
    finally:
        local_workers.end(grace_s)


@contextlib.contextmanager
def joined(device: torch.device | None = None) -> Iterator[DistributedGroup]:
    """Join the group that another process has started, and yield this process's view of it.

    Without `device`, the networks are on the type of device of the first process.
    """
    rank, size = launched()
    stop = StopRequest()
    if started_here():
        # If the first process ends during the wait for the other processes, this process must end,
        # too.
        _follow_first_process(stop)
    else:
        _end_with_parent()
    patience = timedelta(seconds=PATIENCE_S)
    store, _, _ = next(rendezvous("env://", rank, size, timeout=patience))
    with _member(store, rank=rank, size=size, device=device, stop=stop) as group:
        yield group


@contextlib.contextmanager
def _member(
    store: Store,
    *,
    rank: int,
    size: int,
    device: torch.device | None,
    local_workers: Others | None = None,
    stop: StopRequest | None = None,
) -> Iterator[DistributedGroup]:
    """Yield this process's view of the group; report an error to the other processes."""
    # Errors are reported over a second connection. A connection serves one thread at a time, and
    # the thread that waits for the other processes occupies the first connection.
    failure_store: Store = store.clone()  # type: ignore[attr-defined]  # public, but not in the stubs
    with contextlib.ExitStack() as stack:
        try:
            if device is None:
                device = device_of_this_process(usable_device(_kind_of_first(store)))
            elif rank == 0:
                store.set("device", device.type)
            group = DistributedGroup(
                store, rank=rank, size=size, device=device, others=local_workers, stop=stop
            )
            stack.callback(group.close)
            yield group
        except LearnerLostError:
            raise
        except BaseException as error:
            report_failure(failure_store, rank, one_line(error) or type(error).__name__)
            raise


def _kind_of_first(store: Store) -> str:
    """Return the type of device of the first process, such as `cuda`."""
    try:
        return store.get("device").decode()
    except RuntimeError as error:
        raise LearnerLostError("the learner of rank 0 has not started; see its output") from error


def device_of_this_process(device: torch.device) -> torch.device:
    """Return the device, of cuda the GPU with this process's local rank, or SettingsError."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if device.type != "cuda":
        return device
    if ":" in str(device):
        raise SettingsError(
            f"torch_settings.device: {device} is one GPU, but each learner needs its own; use cuda"
        )
    if local >= torch.cuda.device_count():
        raise SettingsError(
            f"torch_settings.device: a learner has the local rank {local}, but this machine has "
            f"{torch.cuda.device_count()} GPUs; use at most one learner per GPU, or cpu"
        )
    chosen = torch.device("cuda", local)
    # NCCL uses the current device, which would be GPU 0 in every process.
    torch.cuda.set_device(chosen)
    return chosen


def broadcast_job(group: DistributedGroup, job: JobSpec | None) -> JobSpec:
    """Return the first process's job; PipelineError if the processes' versions differ."""
    # Versions are compared first, because another version may not have the job's classes.
    notes = group.all_gather_object({"version": __version__, "torch": str(torch.__version__)})
    for rank, note in enumerate(notes):
        for key in ("version", "torch"):
            if note[key] != notes[0][key]:
                raise PipelineError(
                    f"the learner of rank {rank} has {key} {note[key]}, but the learner of rank 0 "
                    f"has {notes[0][key]}; install the same version for all learners"
                )
    jobs: list[Any] = group.all_gather_object(job)
    first: JobSpec = jobs[0]
    return first


def started_here() -> bool:
    """Return whether the first process, and not `torchrun`, has started this process."""
    return bool(os.environ.get(_STARTED_HERE))


def _follow_first_process(stop: StopRequest) -> None:
    """Set `stop` when the first process asks for it; exit when the first process has ended."""

    def read() -> None:
        with contextlib.suppress(OSError, ValueError):
            # `os.read` is used, because sys.stdin would stay locked while the process ends.
            while content := os.read(0, 64):
                stop.signal_number = int(content.split()[0])
        # During this sleep the main thread saves and closes environments; then the process ends.
        time.sleep(_GRACE_S)
        os._exit(PipelineError.exit_code)  # environments end when their connection closes

    threading.Thread(target=read, name="first process", daemon=True).start()


def _end_with_parent() -> None:
    """Send this process SIGTERM when its parent `torchrun` ends, even by kill -9 (prctl(2))."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)


def _input(process: subprocess.Popen[bytes]) -> IO[bytes]:
    if process.stdin is None:
        raise ValueError("the process was started without a pipe at its standard input")
    return process.stdin
