"""`experiments.<name>` of `params.yaml`, and the sections of an experiment."""

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
"""The stages that an experiment may ask for, in the order in which they run."""

# Stages that take a file which the other stage makes.
_NEEDS = {"export": "train", "evaluate": "export"}

_SINKS = iter_modules([str(Path(__file__).parents[1] / "tracking/sinks")])
SINKS: Group[Any] = Group(
    "pipeline.sinks", {module.name: f".{module.name}:for_run" for module in _SINKS}
)
"""What opens a sink for a `TrackedRun`, by name: `for_run` of each file in `tracking/sinks`."""

_EXTRAS = {"mlflow": "train", "tensorboard": "train", "wandb": "wandb"}
"""The extra that installs the package of the same name that one of our sinks needs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RuntimeParams:
    """`runtime`: settings of every stage that computes."""

    torch_threads: Count = 1
    """Threads of each process; a part of the result, since sums round differently with others."""
    device: str = "cpu"
    """`cpu`, `cuda`, `cuda:0`, ..."""
    deterministic: Literal["machine", "portable"] = "machine"
    """Whether a run repeats bit for bit on one kind of processor, or, slower, on every x86-64 with
    AVX, for device cpu; `evaluate` does not repeat on other processors, since ONNX Runtime chooses
    its kernels itself."""

    def __post_init__(self) -> None:
        if self.deterministic == "portable" and self.device != "cpu":
            text = f"'portable' needs device: cpu, got {self.device!r}; GPUs choose kernels too"
            raise ContradictionError("deterministic", text)


@dataclass(frozen=True, kw_only=True, slots=True)
class DemonstrationParams:
    """`demonstrations.<name>`: episodes to record, or a file that is there already."""

    environment: str | None = None
    """A name under `environments`, to record in; required without file."""
    policy: Literal["expert"] = "expert"
    """Who acts: the simulator's own expert."""
    episodes: Count | None = None
    """Episodes to record; required without file."""
    seed: CountOrZero | None = None
    """Seed of the environment and the policy; required without file."""
    file: str | None = None
    """A `.demo` file, for example one that a person has played in Unity, instead of recording."""

    def __post_init__(self) -> None:
        for key in ("environment", "episodes", "seed"):
            value = getattr(self, key)
            if self.file is not None and value is not None:
                text = f"{value!r} is for recording, but 'file' names what is there; remove one"
                raise ContradictionError(key, text)
            if self.file is None and value is None:
                # The missing key has no line; the error stands at a key that is there, if any is.
                place = "environment" if self.environment else "policy"
                text = f"the key {key!r} is required to record; or name a .demo under 'file'"
                raise ContradictionError(place, text)


@dataclass(frozen=True, kw_only=True, slots=True)
class PretrainParams:
    """`experiments.<name>.pretrain`: supervised learning of the demonstrated actions."""

    epochs: Count
    """Passes over all demonstrations."""
    batch_size: Count
    """Demonstrated steps in a minibatch."""
    learning_rate: Positive
    """Step size of Adam."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationParams:
    """`experiments.<name>.evaluation`: episodes of the exported policy."""

    episodes: Count
    """Episodes to play."""
    seed: CountOrZero
    """Seed of the environment; training should use others."""
    stochastic: bool = False
    """Whether actions are drawn, as in training, instead of the most probable ones."""
    video: bool = False
    """Whether to film the median and the best episode, as GIF; not in the trials of a sweep."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ResourceParams:
    """`experiments.<name>.resources`: limits for Snakemake; only a change of threads reruns."""

    threads: Count | None = None
    """Threads of pretrain and train, in place of `runtime.torch_threads`; a change reruns both."""
    memory_mb: Count = 2000
    """Memory of pretrain, and of each learner of train, in MB."""
    minutes: Count = 720
    """Time that train is given, in minutes."""
    gpus: CountOrZero = 0
    """GPUs of pretrain, and of each learner of train; `runtime.device` says if they are used."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExperimentParams:
    """`experiments.<name>`: one trainer configuration in one environment, with several seeds."""

    environment: str
    """A name under `environments`."""
    trainer: str
    """The trainer configuration, relative to params.yaml."""
    overrides: dict[str, Any]
    """Changes to the trainer configuration: nested, or with dotted keys; `{}` for none."""
    seeds: tuple[CountOrZero, ...]
    """One run for each."""
    stages: tuple[Stage, ...]
    """What to run, in order."""
    demonstrations: str | None = None
    """A name under `demonstrations`; needed when `stages` has pretrain. `train` after it may use
    data/demos/<name>.demo as demo_path."""
    pretrain: PretrainParams | None = None
    """Needed when `stages` has pretrain."""
    evaluation: EvaluationParams | None = None
    """Needed when `stages` has evaluate."""
    learners: Count = 1
    """Processes that train one run together, each with its own environments; a change retrains."""
    exact: Literal["preferred", "required"] = "preferred"
    """Whether training that was interrupted and cannot be resumed exactly starts from the beginning
    instead; no part of the result."""
    resources: ResourceParams = field(default_factory=ResourceParams)
    """What its jobs may use."""
    base: str | None = field(default=None, metadata={"internal": True})
    """The experiment that a trial or the best of a sweep is made from."""
    chosen: Path | None = field(default=None, metadata={"internal": True})
    """The file with a sweep's best or proposed values, which a stage of the sweep writes."""

    @property
    def chosen_by(self) -> str:
        """The stage that makes the file `chosen`, as DVC calls it; empty without one."""
        if self.chosen is None:
            return ""
        _, stage, *place = self.chosen.with_suffix("").parts
        return f"{stage}@{'-'.join(part for part in place if part != 'best')}"

    @property
    def filmed(self) -> bool:
        """Whether its evaluation makes videos."""
        return self.evaluation is not None and self.evaluation.video

    def __post_init__(self) -> None:
        check_seeds(self.seeds, "seeds")
        if not self.stages or list(self.stages) != [name for name in STAGES if name in self.stages]:
            expected = f"some of {list(STAGES)}, each once, in this order"
            raise ContradictionError("stages", f"must be {expected}; got {[*self.stages]}")
        # Refused here, so that neither engine begins a DAG with a missing input.
        for stage, before in _NEEDS.items():
            if stage in self.stages and before not in self.stages:
                raise ContradictionError("stages", f"{stage} needs the stage {before!r} before it")
        if "pretrain" in self.stages and self.demonstrations is None:
            raise ContradictionError("stages", "pretrain needs the key 'demonstrations'")
        if self.demonstrations is not None and "pretrain" not in self.stages:
            raise ContradictionError(
                "demonstrations", "is used by the stage pretrain, which 'stages' does not have"
            )
        if "pretrain" in self.stages and self.pretrain is None:
            raise ContradictionError("stages", "pretrain needs the section 'pretrain'")
        if "evaluate" in self.stages and self.evaluation is None:
            raise ContradictionError("stages", "evaluate needs the section 'evaluation'")


class SinkNames(tuple[str, ...]):
    """Names of sinks that are installed, each once."""

    __slots__ = ()

    @classmethod
    def from_node(cls, node: Node, path: str) -> Self:
        """Read a list of names."""
        if not isinstance(node.value, list):
            raise fail(node, path, f"needs a list of sinks, got {display(node)}")
        names = [choice(item, path, SINKS) for item in node.value]
        for name, item in zip(names, node.value, strict=True):
            # Looked for and not imported: these packages take seconds.
            if name in _EXTRAS and find_spec(name) is None:
                remedy = f"pip install 'rl-pipeline[{_EXTRAS[name]}]', or leave {name} out"
                raise fail(item, path, f"the package {name!r} is not installed; {remedy}")
        return cls(dict.fromkeys(names))


def check_seeds(seeds: tuple[int, ...], key: str, named: str = "") -> None:
    """Refuse no seed, and a seed twice; `named` begins the message where `key` is not the seeds."""
    if not seeds or len(set(seeds)) != len(seeds):
        text = f"{named}needs one seed or more, each once, got {list(seeds)}"
        raise ContradictionError(key, text)
