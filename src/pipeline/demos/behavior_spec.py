"""The specification of a demonstration's behavior, from a file or an environment."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.core.specs import ActionSpec, BehaviorSpec, ObservationSpec, ObservationType
from pipeline.demos.demo_file import read_demo
from pipeline.demos.tables import Columns
from pipeline.envs.base import BaseEnv
from pipeline.errors import DemonstrationError, SettingsError
from pipeline.settings.nodes import fail, find
from pipeline.settings.reader import ContradictionError, Count, CountOrZero, read_dataclass, to_map
from pipeline.settings.yaml_file import read_yaml

_GOAL = ObservationType.GOAL_SIGNAL


@dataclass(frozen=True, kw_only=True, slots=True)
class ObservationEntry:
    """An entry of `observations` in a specification file."""

    shape: tuple[Count, ...]
    """[size] of a vector, [entries, size] of a list of entities, [channels, height, width] of an
    image."""
    name: str = ""
    """Name of the observation in the environment."""
    goal: bool = False
    """Whether the observation is a goal signal."""

    def __post_init__(self) -> None:
        """Raise ContradictionError unless the shape has 1 to 3 dimensions."""
        if not 1 <= (n := len(self.shape)) <= 3:
            text = f"needs 1 to 3 sizes, got {n}; take the specification from a .demo file"
            raise ContradictionError("shape", text)

    def spec(self) -> ObservationSpec:
        """Return the observation's specification, as environments announce it."""
        kinds = (ObservationSpec.vector, ObservationSpec.entities, ObservationSpec.visual)
        make: Callable[..., ObservationSpec] = kinds[len(self.shape) - 1]
        kind = _GOAL if self.goal else ObservationType.DEFAULT
        return make(*self.shape)._replace(name=self.name, observation_type=kind)


@dataclass(frozen=True, kw_only=True, slots=True)
class ActionsEntry:
    """The entry `actions` in a specification file."""

    continuous: CountOrZero = 0
    """Number of continuous actions, each in -1..1."""
    discrete: tuple[Count, ...] = ()
    """Number of choices of each discrete branch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpecFile:
    """The content of a specification file."""

    behavior: str
    """Name of the behavior, without team."""
    observations: tuple[ObservationEntry, ...]
    """Observations, in the order in which the environment sends them."""
    actions: ActionsEntry
    """The actions of the behavior."""
    columns: dict[str, Any] = field(default_factory=dict)
    """Column name, or list of column names, of each table field whose columns have other names."""

    def spec(self) -> BehaviorSpec:
        """Return the specification that an environment would announce."""
        actions = ActionSpec(self.actions.continuous, self.actions.discrete)
        return BehaviorSpec([entry.spec() for entry in self.observations], actions)


def read_spec_file(path: Path) -> tuple[str, BehaviorSpec, Columns]:
    """Return a behavior's name, specification and table columns from a YAML file.

    Raises:
        SettingsError: The file cannot be read, or a key or value in it is wrong.
    """
    node = read_yaml(path, what="Specification file")
    # A trainer configuration is a likely mistake, and the error for unknown keys would not name it.
    if isinstance(node.value, dict) and node.value.keys() & {"behaviors", "default_settings"}:
        text = "is a trainer configuration; name a .demo file, or a specification file"
        raise SettingsError(f"{path}: {text}")
    read: SpecFile = read_dataclass(SpecFile, node, "")
    columns = {}
    for name, value in read.columns.items():
        names = value if isinstance(value, list) else [value]
        if not names or not all(isinstance(column, str) for column in names):
            expected = f"needs the name of a column, or a list of such names, got {value!r}"
            raise fail(find(node, f"columns.{name}"), f"columns.{name}", expected)
        columns[name] = names
    return read.behavior, read.spec(), columns


def spec_file(behavior: str, spec: BehaviorSpec) -> dict[str, Any]:
    """Return the content of a specification file for a behavior; see `read_spec_file`."""
    observations = [
        ObservationEntry(shape=obs.shape, name=obs.name, goal=obs.observation_type == _GOAL)
        for obs in spec.observation_specs
    ]
    actions = ActionsEntry(
        continuous=spec.action_spec.continuous_size, discrete=spec.action_spec.discrete_branches
    )
    file = SpecFile(behavior=behavior, observations=tuple(observations), actions=actions)
    # A specification does not say which columns a table has, so the key `columns` is left out.
    return {key: value for key, value in to_map(file).items() if key != "columns"}


def spec_of(
    source: str,
    make_env: Callable[[str], BaseEnv],
    behavior: str | None = None,
    *,
    default: str | None = None,
    renames: bool = True,
) -> tuple[str, BehaviorSpec, Columns]:
    """Return a behavior's name and specification, and the table columns that a YAML file names.

    Args:
        source: a YAML or JSON file, a `.demo` file, or an environment that `make_env` makes.
        make_env: function that returns the environment with a given name.
        behavior: one of an environment's behaviors; else a new name for the source's behavior.
        default: behavior of an environment with several behaviors, if `behavior` is None.
        renames: whether `behavior` may replace the name of the source's only behavior.

    Raises:
        PipelineError: The source cannot be read or opened, or has no such behavior.
    """
    columns: Columns = {}
    if source.endswith((".yaml", ".yml", ".json")):
        name, spec, columns = read_spec_file(Path(source))
        specs = {name: spec}
    elif source.endswith(".demo"):
        demo = read_demo(source)
        specs = {demo.behavior_name: demo.spec}
    else:
        env = make_env(source)
        try:
            # An environment announces a behavior with its first agents, after a reset.
            env.reset()
            # As in demonstrations, names have no team: the teams of a behavior share its
            # specification.
            specs = {name.partition("?")[0]: spec for name, spec in env.behavior_specs.items()}
        finally:
            env.close()
    # With a single behavior there is nothing to choose, so a given name is the behavior's new name.
    if len(specs) == 1 and (behavior is None or renames):
        ((name, spec),) = specs.items()
        return behavior or name, spec, columns
    chosen = behavior or default
    if chosen not in specs:
        names = ", ".join(specs)
        raise DemonstrationError(
            f"{source}: has the behaviors {names}; name one of them with --behavior"
            if behavior is None
            else f"--behavior: {source} has no behavior {behavior!r}; name one of {names}"
        )
    return chosen, specs[chosen], columns
