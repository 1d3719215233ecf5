"""How much later than in mlagents-learn a lesson with `signal_smoothing` ends, in episodes.

Returns rise from 0 to 3 in 3000 episodes with a noise of 0.5; the lesson ends above 1.5. The rule
of mlagents-learn 1.1.0 (0.25 of the old measure and 0.75 of the mean, at every step of the
environment) is written out here, with 20 steps an episode. Printed are, for each min_lesson_length,
the share of 100 runs that end at the same episode, and how many episodes later ours end.

    python benchmarks/lesson_smoothing.py
"""

from __future__ import annotations

import numpy as np

from pipeline.settings.trainer.schema import (
    CompletionCriteria,
    ConstantSampler,
    EnvironmentParameter,
    Lesson,
)
from pipeline.trainer.curriculum import Curriculum

N_EPISODES, N_STEPS, N_SEEDS, THRESHOLD = 3000, 20, 100, 1.5


def main() -> None:
    """Print a line for each min_lesson_length."""
    print("min_lesson_length  same episode  mean  90th percentile")  # noqa: T201  # a command
    for length in (1, 10, 100):
        later = np.array(
            [ours(r, length) - theirs(r, length) for r in map(returns, range(N_SEEDS))]
        )
        same, mean, high = np.mean(later == 0), later.mean(), np.percentile(later, 90)
        print(f"{length:17} {same:12.0%} {mean:6.1f} {high:10.0f}")  # noqa: T201  # a command


def returns(seed: int) -> list[float]:
    """Rising returns of one run."""
    noise = np.random.default_rng(seed).normal(0.0, 0.5, N_EPISODES)
    return (np.linspace(0.0, 2 * THRESHOLD, N_EPISODES) + noise).tolist()


def theirs(values: list[float], length: int) -> int:
    """The episode after which mlagents-learn begins the next lesson."""
    smoothed = 0.0
    for episode in range(length, len(values) + 1):
        mean = float(np.mean(values[episode - length : episode]))
        for _ in range(N_STEPS):
            smoothed = 0.25 * smoothed + 0.75 * mean
            if smoothed > THRESHOLD:
                return episode
    return len(values)


def ours(values: list[float], length: int) -> int:
    """The episode after which our curriculum begins the next lesson."""
    criteria = CompletionCriteria(behavior="B", threshold=THRESHOLD, min_lesson_length=length)
    lessons = (
        Lesson(name="first", value=ConstantSampler(), completion_criteria=criteria),
        Lesson(name="second", value=ConstantSampler()),
    )
    curriculum = Curriculum({"p": EnvironmentParameter(curriculum=lessons)})
    for episode, value in enumerate(values, start=1):
        curriculum.observe("B", returns=[value], step=0, max_steps=1)
        if curriculum.advance().parameters:
            return episode
    return len(values)


if __name__ == "__main__":
    main()
