"""The DAG on a real SLURM of one node, started for it: do jobs that meet their limit end whole?

    apt-get install slurm-wlm munge
    pip install -e '.[slurm]'
    python benchmarks/slurm.py
    python benchmarks/slurm.py --trained-s 280      longer, to meet the limit twice

Starts munged, slurmctld and slurmd on the loopback interface with a configuration, keys, ports and
logs of their own below a temporary folder, as the user that calls it. Then `snakemake --profile
profiles/slurm` makes a small experiment, and another one with so many steps that its training takes
longer than the scheduler lets it: SLURM sends SIGUSR1 two minutes before the limit, the stage saves
and ends with 138, and its retry continues from the step that was saved. Without SLURM and its limit
the second experiment is then made once more: every file of its results must be the same. Ends what
it has started, and nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from worktrees import change_params, copy_project, environment, processes_in

from pipeline.files import sha256_of

if TYPE_CHECKING:
    from collections.abc import Iterator

DAEMONS = ("munged", "slurmctld", "slurmd")
PARAMS = """\
runtime: {torch_threads: 1, device: cpu}
environments:
  balance_ball: {source: builtin, args: []}
demonstrations: {}
experiments:
  quick: &quick
    environment: balance_ball
    trainer: config/ppo/3DBall.yaml
    overrides:
      behaviors.3DBall.max_steps: 100000
      behaviors.3DBall.summary_freq: 10000
      behaviors.3DBall.hyperparameters.buffer_size: 1000
    seeds: [1]
    stages: [train, export, evaluate]
    evaluation: {episodes: 4, seed: 10000}
    resources: {minutes: 5, memory_mb: 1000}
  late:
    <<: *quick
    overrides:
      behaviors.3DBall.max_steps: STEPS
      behaviors.3DBall.summary_freq: 10000
      behaviors.3DBall.hyperparameters.buffer_size: 1000
    resources: {minutes: 4, memory_mb: 1000}
"""
CONFIGURATION = """\
ClusterName=loopback
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
KillWait=10
MinJobAge=300
NodeName={host} NodeAddr=127.0.0.1 CPUs={cores} RealMemory=8000 State=UNKNOWN
PartitionName=main Nodes={host} Default=YES MaxTime=60 State=UP
"""
TRAINED_S = 200.0
"""Planned seconds of training of the second experiment, at the pace of the first.

More than pass before the warning, and less than four tries last, even at half or twice that pace.
"""
STARTUP_S = 60.0


def main() -> int:
    """Run, print the results as JSON, and return 1 if a check fails."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trained-s", type=float, default=TRAINED_S)
    trained_s = parser.parse_args().trained_s
    if missing := [name for name in DAEMONS if find(name) is None]:
        sys.exit(f"not installed: {', '.join(missing)}; `apt-get install slurm-wlm munge`")
    with tempfile.TemporaryDirectory() as folder:
        results = measure(Path(folder), trained_s)
    print(json.dumps(results, indent=2))  # noqa: T201  # the result
    return 0 if whole(results) else 1


def find(name: str) -> str | None:
    """A daemon's program, which may lie outside a user's PATH."""
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")


def whole(found: dict[str, Any]) -> bool:
    """Whether every check passes."""
    return bool(
        found["exit_code"] == 0
        and found["evaluated"] == ["late", "quick"]
        and found["stopped"] > 0
        and found["resumed_from_step"]
        and found["files"]
        and not found["differences"]
        and not found["left_over"]
    )


def measure(folder: Path, trained_s: float = TRAINED_S) -> dict[str, Any]:
    """Run the experiments through a SLURM in `folder`, and return the results."""
    root = copy_project(folder / "project", PARAMS.replace("STEPS", "100000"))
    started = time.monotonic()
    with slurm(folder) as configuration:
        first = snakemake(root, configuration, "results/quick")
        steps = int(trained_s * pace((root / "logs/train/quick/seed1.log").read_text()))
        change_params(root, PARAMS.replace("STEPS", str(steps)))
        second = snakemake(root, configuration, "results/late")
    mine, other = digests(root), digests(undisturbed(folder / "undisturbed", root))
    output = first.stdout + first.stderr + second.stdout + second.stderr
    if first.returncode or second.returncode:
        sys.stderr.write(output[-6000:])
    job_logs = [log.read_text() for log in (root / ".snakemake/slurm_logs").rglob("*.log")]
    log = (root / "logs/train/late/seed1.log").read_text()
    return {
        "exit_code": first.returncode or second.returncode,
        "seconds": round(time.monotonic() - started, 1),
        "steps_of_late": steps,
        "submitted": output.count("has been submitted with SLURM jobid"),
        "stopped": sum("(command exited with non-zero exit code)" in text for text in job_logs),
        "resumed_from_step": [
            int(n) for n in re.findall(r"Resuming training of \S+ from step (\d+)", log)
        ],
        "evaluated": sorted(
            path.parents[1].name for path in root.glob("results/evaluate/*/seed1/metrics.json")
        ),
        "files": len(mine),
        "differences": sorted(n for n in {**mine, **other} if mine.get(n) != other.get(n)),
        "left_over": [" ".join(process.cmdline()) for process in processes_in(folder)],
    }


def undisturbed(folder: Path, project: Path) -> Path:
    """Run the second experiment without a limit in a copy of the project; return the copy."""
    root = copy_project(folder, (project / "params.yaml").read_text())
    command = [sys.executable, "-m", "snakemake", "--cores", "1", "--", "results/late"]
    completed = subprocess.run(  # noqa: S603  # fixed command
        command, cwd=root, env=environment(root), capture_output=True, text=True, check=False
    )
    if completed.returncode:
        sys.stderr.write(completed.stderr[-6000:])
    return root


def digests(root: Path) -> dict[str, str]:
    """SHA-256 of each file of the second experiment's results."""
    paths = (path for path in root.glob("results/*/late/**/*") if path.is_file())
    return {str(path.relative_to(root)): sha256_of(path) for path in sorted(paths)}


def pace(log: str) -> float:
    """Steps per second between the first summary in a training's log and the last one.

    What comes before the first is start-up, which a longer training has only once.
    """
    summaries = re.findall(r"Step: (\d+)\. Time Elapsed: ([\d.]+) s", log)
    (first, begun), (last, ended) = summaries[0], summaries[-1]
    return (int(last) - int(first)) / (float(ended) - float(begun))


def snakemake(root: Path, configuration: Path, *targets: str) -> subprocess.CompletedProcess[str]:
    """Run the DAG with the profile, and the options that a SLURM without accounting needs."""
    return subprocess.run(  # noqa: S603  # fixed command
        [
            *(sys.executable, "-m", "snakemake", "--profile", "profiles/slurm"),
            *("--slurm-no-account", "--slurm-status-command", "squeue"),
            *("--slurm-init-seconds-before-status-checks", "2"),
            *("--seconds-between-status-checks", "2", "--", *targets),
        ],
        cwd=root,
        env=variables(root, configuration),
        capture_output=True,
        text=True,
        check=False,
        timeout=3000,
    )


def variables(root: Path, configuration: Path) -> dict[str, str]:
    """Variables for the engine, with an `srun` that finds our configuration.

    The plugin takes SLURM_CONF away from the `srun` that it calls inside a job.
    """
    folder = configuration.with_name("bin")
    folder.mkdir(exist_ok=True)
    wrapper = folder / "srun"
    wrapper.write_text(f'#!/bin/sh\nSLURM_CONF={configuration} exec {find("srun")} "$@"\n')
    wrapper.chmod(0o755)
    inherited = environment(root)
    path = os.pathsep.join((str(folder), inherited["PATH"]))
    return inherited | {"SLURM_CONF": str(configuration), "PATH": path}


@contextlib.contextmanager
def slurm(folder: Path) -> Iterator[Path]:
    """Run a SLURM of one node for the block; yield its configuration file."""
    import getpass

    for name in ("state", "spool"):
        (folder / name).mkdir()
    configuration = folder / "slurm.conf"
    ports = free_ports(2)
    text = CONFIGURATION.format(
        host=socket.gethostname().partition(".")[0],
        folder=folder,
        user=getpass.getuser(),
        cores=os.cpu_count(),
        controller_port=ports[0],
        node_port=ports[1],
    )
    configuration.write_text(text)
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    munge_options = [
        f"--{name}={folder}/munge.{name}" for name in ("socket", "log-file", "pid-file")
    ]
    munge_options += [
        f"--seed-file={folder}/munge.seed",
        f"--key-file={key}",
        "--foreground",
        "--force",
    ]
    settings = os.environ | {"SLURM_CONF": str(configuration)}
    with contextlib.ExitStack() as started:
        for name, arguments in (
            ("munged", munge_options),
            ("slurmctld", ["-D", "-f", str(configuration)]),
            ("slurmd", ["-D", "-f", str(configuration)]),
        ):
            log = started.enter_context((folder / f"{name}.out").open("w"))
            process = subprocess.Popen(  # noqa: S603  # the daemon, with our configuration
                [str(find(name)), *arguments], env=settings, stdout=log, stderr=log
            )
            started.callback(end, process)
            if name == "munged":
                wait_for((folder / "munge.socket").exists, "munged", folder)
        wait_for(lambda: "idle" in nodes(settings), "slurmd", folder)
        started.callback(cancel_all, settings)
        yield configuration


def cancel_all(settings: dict[str, str]) -> None:
    """End the jobs that are left, which would outlive the daemons."""
    subprocess.run(  # noqa: S603  # fixed command
        ["scancel", f"--user={os.getuid()}"],  # noqa: S607  # from the same package
        env=settings,
        check=False,
        timeout=60,
    )
    limit = time.monotonic() + STARTUP_S
    while "idle" not in nodes(settings) and time.monotonic() < limit:
        time.sleep(0.5)


def nodes(settings: dict[str, str]) -> str:
    """States of the nodes, as sinfo says."""
    completed = subprocess.run(
        ["sinfo", "--noheader", "--format=%T"],  # noqa: S607  # fixed command
        env=settings,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return completed.stdout


def wait_for(ready: Any, name: str, folder: Path) -> None:
    """Wait until a daemon answers; a failure shows its output."""
    limit = time.monotonic() + STARTUP_S
    while not ready():
        if time.monotonic() > limit:
            output = (folder / f"{name}.out").read_text()[-2000:]
            sys.exit(f"{name} does not answer after {STARTUP_S:g} s:\n{output}")
        time.sleep(0.2)


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    with contextlib.ExitStack() as open_sockets:
        sockets = [open_sockets.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in sockets]


def end(process: subprocess.Popen[bytes]) -> None:
    """End a daemon that this program has started."""
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(20)


if __name__ == "__main__":
    sys.exit(main())
