"""The settings of an experiment in `params.yaml`."""

from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, Literal, Self, get_args

from pipeline.plugins import Group
from pipeline.settings.nodes import Node, fail
from pipeline.settings.reader import (
    ContradictionError,
    Count,
    CountOrZero,
    Positive,
    choice,
    display,
)

Stage = Literal["pretrain", "train", "export", "evaluate"]
STAGES: tuple[Stage, ...] = get_args(Stage)
"""The stages that an experiment may have, in the order in which they run."""

# The names come from file names, because importing the sinks would import MLflow and TensorBoard.
_SINKS = iter_modules([str(Path(__file__).parents[2] / "tracking/sinks")])
SINKS: Group[Any] = Group(
    "pipeline.sinks", {module.name: f".{module.name}:for_run" for module in _SINKS}
)
"""Functions that open a sink for a `TrackedRun`, by the sink's name. Each is `for_run` in
`tracking/sinks/<name>.py`."""

_EXTRAS = {"mlflow": "train", "tensorboard": "train", "wandb": "wandb"}
"""For each of these sinks: the extra that installs the package which the sink needs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RuntimeParams:
    """`runtime`: threads, device and kernels of torch in the stages of every run."""

    # The default is one thread, because sums over several threads round differently.
    torch_threads: Count = 1
    """Number of torch's threads in each process; it affects the results, because sums round
    differently."""
    device: str = "cpu"
    """Device of the networks: `cpu`, `cuda`, `cuda:0`, ..."""
    deterministic: Literal["machine", "portable"] = "machine"
    """`machine`: runs repeat bit for bit on one processor model. `portable`: runs repeat bit for
    bit on every x86-64 CPU with AVX; they are slower, and need the device cpu. The stage evaluate
    does not become portable, because ONNX Runtime chooses its kernels itself."""

    def __post_init__(self) -> None:
        # The variables of `machine.PORTABLE` choose kernels of CPUs only.
        if self.deterministic == "portable" and self.device != "cpu":
            text = f"'portable' needs device: cpu, got {self.device!r}; a GPU has other kernels"
            raise ContradictionError("deterministic", text)


@dataclass(frozen=True, kw_only=True, slots=True)
class DemonstrationParams:
    """`demonstrations.<name>`: episodes to record, or an existing file."""

    environment: str | None = None
    """The environment to record in, from `environments`; required if `file` is not given."""
    policy: Literal["expert"] = "expert"
    """The policy that plays the recorded episodes: the simulator's expert."""
    episodes: Count | None = None
    """Number of episodes to record; required if `file` is not given."""
    seed: CountOrZero | None = None
    """Seed of the environment and the policy; required if `file` is not given."""
    file: str | None = None
    """An existing `.demo` file, for example from Unity, which is used in place of a recording."""

    def __post_init__(self) -> None:
        for key in ("environment", "episodes", "seed"):
            value = getattr(self, key)
            if self.file is not None and value is not None:
                text = f"{value!r} is for recording, but 'file' names a recording; remove one"
                raise ContradictionError(key, text)
            if self.file is None and value is None:
                # A missing key has no line, so the error names the line of another key.
                place = "environment" if self.environment else "policy"
                text = f"the key {key!r} is required for recording; or name a .demo under 'file'"
                raise ContradictionError(place, text)


@dataclass(frozen=True, kw_only=True, slots=True)
class PretrainParams:
    """`experiments.<name>.pretrain`: supervised learning of the demonstrated actions."""

    epochs: Count
    """Number of epochs: passes over all demonstrations."""
    batch_size: Count
    """Number of demonstrated steps in a minibatch."""
    learning_rate: Positive
    """Step size of Adam."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationParams:
    """`experiments.<name>.evaluation`: episodes of the exported policy."""

    episodes: Count
    """Number of episodes to play."""
    seed: CountOrZero
    """Seed of the environment; use other seeds than in training."""
    stochastic: bool = False
    """Whether actions are sampled, as in training, in place of the most probable ones."""
    video: bool = False
    """Whether to save GIF videos of the median and the best episode; not for trials of a sweep."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ResourceParams:
    """`experiments.<name>.resources`: limits for the jobs that Snakemake starts."""

    threads: Count | None = None
    """Number of threads of the stages pretrain and train, in place of `runtime.torch_threads`; a
    change reruns both stages."""
    memory_mb: Count = 2000
    """Memory of the stage pretrain, and of each learner of the stage train, in MB."""
    minutes: Count = 720
    """Time limit of the stage train in minutes."""
    gpus: CountOrZero = 0
    """Number of GPUs of the stage pretrain, and of each learner of the stage train;
    `runtime.device` decides whether the GPUs are used."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExperimentParams:
    """`experiments.<name>`: one trainer configuration in one environment, with several seeds."""

    environment: str
    """Name of the environment, from `environments`."""
    trainer: str
    """Path of the trainer configuration, relative to params.yaml."""
    overrides: dict[str, Any]
    """Changes to the trainer configuration: nested, or with dotted keys; `{}` for none."""
    seeds: tuple[CountOrZero, ...]
    """Seeds of the runs: one run for each seed."""
    stages: tuple[Stage, ...]
    """The stages to run, in order."""
    demonstrations: str | None = None
    """Name of demonstrations; required by the stage pretrain. The stage train after it may use
    data/demos/<name>.demo as demo_path."""
    pretrain: PretrainParams | None = None
    """Settings of the stage pretrain, which requires them."""
    evaluation: EvaluationParams | None = None
    """Settings of the stage evaluate, which requires them."""
    learners: Count = 1
    """Number of processes that train one run together, each with its own environments; a change
    reruns the stage train."""
    exact: Literal["preferred", "required"] = "preferred"
    """`required`: interrupted training that cannot be resumed exactly restarts from the beginning;
    `preferred`: such training is resumed. The key has no effect on uninterrupted training."""
    resources: ResourceParams = field(default_factory=ResourceParams)
    """Resource limits of the experiment's jobs."""
    base: str | None = field(default=None, metadata={"internal": True})
    """For a sweep's trial or best configuration: the experiment that the sweep changes."""
    chosen: Path | None = field(default=None, metadata={"internal": True})
    """The file with a sweep's best or proposed values, written by a stage of the sweep."""

    @property
    def chosen_by(self) -> str:
        """DVC's name of the stage that writes the file `chosen`; empty if `chosen` is None."""
        if self.chosen is None:
            return ""
        # The path results/<stage>/<sweep>/<number>.json becomes `<stage>@<sweep>-<number>`.
        _, stage, *place = self.chosen.with_suffix("").parts
        return f"{stage}@{'-'.join(part for part in place if part != 'best')}"

    @property
    def filmed(self) -> bool:
        """Whether the experiment's evaluation writes videos."""
        return self.evaluation is not None and self.evaluation.video

    def __post_init__(self) -> None:
        check_seeds(self.seeds, "seeds")
        if not self.stages or list(self.stages) != [name for name in STAGES if name in self.stages]:
            expected = f"some of {list(STAGES)}, each once, in this order"
            raise ContradictionError("stages", f"must be {expected}; got {[*self.stages]}")
        # DVC and Snakemake must not start with a missing input.
        for stage, before in {"export": "train", "evaluate": "export"}.items():
            if stage in self.stages and before not in self.stages:
                raise ContradictionError("stages", f"{stage} needs the stage {before!r} before it")
        for stage, kind, key in (
            ("pretrain", "key", "demonstrations"),
            ("pretrain", "section", "pretrain"),
            ("evaluate", "section", "evaluation"),
        ):
            if stage in self.stages and getattr(self, key) is None:
                raise ContradictionError("stages", f"{stage} needs the {kind} {key!r}")
        if self.demonstrations is not None and "pretrain" not in self.stages:
            text = "only the stage pretrain uses this key; add the stage to 'stages'"
            raise ContradictionError("demonstrations", text)


class SinkNames(tuple[str, ...]):
    """A list of names of installed sinks, without repetitions."""

    __slots__ = ()

    @classmethod
    def from_node(cls, node: Node, path: str) -> Self:
        """Read a list of names of sinks."""
        if not isinstance(node.value, list):
            raise fail(node, path, f"needs a list of sinks, got {display(node)}")
        names = [choice(item, path, SINKS) for item in node.value]
        for name, item in zip(names, node.value, strict=True):
            # `find_spec` does not import the packages; an import would take seconds.
            if name in _EXTRAS and find_spec(name) is None:
                remedy = f"pip install 'rl-pipeline[{_EXTRAS[name]}]', or leave {name} out"
                raise fail(item, path, f"the package {name!r} is not installed; {remedy}")
        return cls(dict.fromkeys(names))


def check_seeds(seeds: tuple[int, ...], key: str, named: str = "") -> None:
    """Raise ContradictionError for the key `key` if seeds are absent or repeated."""
    if not seeds or len(set(seeds)) != len(seeds):
        text = f"{named}needs one seed or more, each once, got {list(seeds)}"
        raise ContradictionError(key, text)
