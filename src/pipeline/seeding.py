"""Named random streams: every use of chance has its own, all from one seed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np


def sequence(seed: int, *names: str | int) -> np.random.SeedSequence:
    """Return the seed sequence of the stream called `names` under `seed`.

    Streams with different names are independent; equal seeds and names always give the same one.
    """
    # With types and a separator, or else 1 and "1", and ("a", "b") and ("ab",), would share one.
    text = "\0".join(f"{type(name).__name__}:{name}" for name in names)
    # Little-endian on every machine, so that all have the same streams.
    words = np.frombuffer(hashlib.sha256(text.encode()).digest(), dtype="<u4")
    # SeedSequence takes no negative numbers.
    return np.random.SeedSequence([seed & 0xFFFFFFFFFFFFFFFF, *(int(word) for word in words)])


def stream(seed: int, *names: str | int) -> np.random.Generator:
    """Return a NumPy generator for the stream called `names` under `seed`."""
    return np.random.Generator(np.random.PCG64(sequence(seed, *names)))


def derive(seed: int, *names: str | int) -> int:
    """Return an integer in [0, 2**31) for libraries that take an integer seed."""
    # 31 bits: Unity's protocol has a seed as int32.
    return int(sequence(seed, *names).generate_state(1, np.uint32)[0] >> 1)


def of_behavior(seed: int, name: str, listed: Iterable[str]) -> int:
    """Return the seed of one behavior, so that several in a run share no stream.

    Args:
        seed: of the run.
        name: of the behavior.
        listed: behaviors of the configuration; a single one has the run's seed.
    """
    return seed if list(listed) == [name] else derive(seed, "behavior", name)
