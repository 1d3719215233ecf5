"""Training runs of the cases, kept in a folder from one call of a benchmark to the next."""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import yaml
from evaluate_policies import SEED, match, returns
from peer import Curve, train

from pipeline.files import write_whole

if TYPE_CHECKING:
    from cases import Case

    from pipeline.evaluation.statistics import Summary

NAMES = {"ours": "ours", "peer": "mlagents-learn"}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One training run and what its policy is worth."""

    settings: str
    """Digest of what was trained and where."""
    curve: Curve
    """What the run printed."""
    sampled: float
    """Mean return of the final policy with sampled actions."""
    deterministic: float
    """The same with its most probable ones."""
    episodes: int = 400
    """Of each of the two measurements."""
    played_with: int | None = None
    """Seed of the two measurements."""


class Runs:
    """The runs of one case, each trained at its first use.

    Args:
        case: what is trained.
        folder: where runs lie; they stay there.
        steps: instead of the settings' `max_steps`; such runs lie apart.
        sources: of ours.
        threaded: whether both programs learn while the environment steps; such runs lie apart.
    """

    def __init__(
        self,
        case: Case,
        folder: Path,
        *,
        steps: int | None,
        sources: Path,
        threaded: bool = False,
    ) -> None:
        self._case, self._sources, self._threaded = case, sources, threaded
        name = f"{case.name}-{steps}" if steps else case.name
        self._folder = folder.resolve() / (f"{name}-threaded" if threaded else name)
        content = case.settings(steps, Path("expert.demo"), threaded=threaded)
        environment = case.environment
        demonstrations = [case.n_demonstrations] if case.n_demonstrations else []
        described = json.dumps([content, environment.name, environment.options, *demonstrations])
        self._digest = hashlib.sha256(described.encode()).hexdigest()
        (behavior,) = content["behaviors"].values()
        self.max_steps: int = behavior["max_steps"]

    def outcome(self, program: str, seed: int) -> Outcome:
        """Return a program's outcome with a seed; train or measure if it is missing or outdated."""
        outcome_file = self._folder / f"{program}-{seed}.json"
        curve = None
        if outcome_file.exists():
            content = json.loads(outcome_file.read_text())
            old = Outcome(**{**content, "curve": Curve(**content["curve"])})
            if old.settings == self._digest:
                expected = (self._case.n_episodes, SEED + seed)
                if (old.episodes, old.played_with) == expected:
                    return old
                curve = old.curve
        if curve is None:
            curve = self._train(program, seed)
        models = self._folder / f"{program}-{seed}"
        outcome = Outcome(
            settings=self._digest,
            curve=curve,
            sampled=returns(self._case, models, seed=seed, deterministic=False),
            deterministic=returns(self._case, models, seed=seed, deterministic=True),
            episodes=self._case.n_episodes,
            played_with=SEED + seed,
        )
        write_whole(outcome_file, json.dumps(asdict(outcome)))
        sys.stderr.write(
            f"{self._case.name}, {NAMES[program]}, seed {seed}: {outcome.sampled:.3f} sampled, "
            f"{outcome.deterministic:.3f} deterministic, {curve.wall_s:.0f} s\n"
        )
        return outcome

    def matches(self, seeds: list[int]) -> list[float]:
        """Return the mean return of ours against the peer's in a duel, for each seed."""
        place = self._folder
        return [
            match(self._case, place / f"ours-{seed}", place / f"peer-{seed}", seed=seed)
            for seed in seeds
        ]

    def _train(self, program: str, seed: int) -> Curve:
        self._folder.mkdir(parents=True, exist_ok=True)
        config = self._folder / "trainer.yaml"
        demo = self._case.demonstrations(self._folder)
        content = self._case.settings(self.max_steps, demo, threaded=self._threaded)
        config.write_text(yaml.safe_dump(content, sort_keys=False))
        env = self._case.environment.build(self._folder)
        return train(program, config, env, seed=seed, folder=self._folder, sources=self._sources)


def interval(summary: Summary | None, digits: int | None = None) -> str:
    """Format a mean over seeds and its 95 % interval; small numbers get three digits."""
    if summary is None:
        return "not run"
    if digits is None:
        digits = n_digits(summary.mean)
    mean = f"{summary.mean:.{digits}f}"
    if summary.ci_low is None or summary.ci_high is None:
        return f"{mean} (one seed)"
    return f"{mean} [{summary.ci_low:.{digits}f}, {summary.ci_high:.{digits}f}]"


def n_digits(value: float) -> int:
    """Digits after the point that a table shows of a value of this size."""
    return 3 if abs(value) < 10 else 2


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
