"""`claims.yaml`: claims about the results of a project's experiments."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pipeline.settings.reader import ContradictionError, Fraction, NonNegative, read
from pipeline.settings.yaml_file import read_yaml

CLAIMS, LOCK = Path("claims.yaml"), Path("claims.lock")
"""The file of claims, and the file with digests and records of the results behind the claims."""
_KINDS = (
    ("metric", "value", "interval"),
    ("metric", "value", "tolerance"),
    ("better_than", "probability"),
)
"""The keys of each kind of claim, in addition to `experiment` and `behavior`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """`<name>`: a claim about an experiment's value, or a comparison of two experiments."""

    experiment: str
    """Name of an experiment of params.yaml."""
    behavior: str | None = None
    """Name of the behavior; required if the experiment has several behaviors."""
    metric: Literal["iqm", "mean"] | None = None
    """Interquartile mean or mean of the seeds' scores, as in the report."""
    value: float | None = None
    """The claimed value of the metric."""
    interval: tuple[float, float] | None = None
    """Ends of the value's 95 % interval, which the interval of a reproduction must overlap."""
    tolerance: NonNegative | None = None
    """Largest allowed distance of a reproduced value from `value`; given in place of `interval`."""
    better_than: str | None = None
    """The other experiment, for a comparison in place of a value."""
    probability: Fraction | None = None
    """The claim is that a run of `experiment` does better than a run of `better_than` with at least
    this probability."""

    def __post_init__(self) -> None:
        keys = {key for kind in _KINDS for key in kind}
        given = {key for key in keys if getattr(self, key) is not None}
        if given not in map(set, _KINDS):
            kinds = "; or ".join(", ".join(kind) for kind in _KINDS)
            text = f"needs the keys {kinds}; has {', '.join(sorted(given)) or 'none of them'}"
            raise ContradictionError("experiment", text)
        if self.interval is not None and sorted(self.interval) != [*self.interval]:
            raise ContradictionError("interval", "write the lower end first")


def load_claims(root: Path) -> dict[str, Claim]:
    """Return the claims of a project by name; {} without `claims.yaml`."""
    path = root / CLAIMS
    node = read_yaml(path, what="Claims file") if path.is_file() else None
    claims: dict[str, Claim] = {} if node is None else read(dict[str, Claim], node, "")
    return claims
