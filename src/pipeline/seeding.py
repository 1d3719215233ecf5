"""Named random streams, derived from one seed: every use of random numbers has its own stream."""

import hashlib
from collections.abc import Iterable

import numpy as np


def sequence(seed: int, *names: str | int) -> np.random.SeedSequence:
    """Return the seed sequence of the stream called `names` under `seed`.

    Streams with different names are independent; equal seeds and names give equal streams.
    """
    # Types and a separator distinguish 1 from "1", and ("a", "b") from ("ab",).
    text = "\0".join(f"{type(name).__name__}:{name}" for name in names)
    # Words are read as little-endian, so that all machines have the same streams.
    words = np.frombuffer(hashlib.sha256(text.encode()).digest(), dtype="<u4")
    # SeedSequence does not accept negative numbers.
    return np.random.SeedSequence([seed & 0xFFFFFFFFFFFFFFFF, *(int(word) for word in words)])


def stream(seed: int, *names: str | int) -> np.random.Generator:
    """Return a NumPy generator for the stream called `names` under `seed`."""
    return np.random.Generator(np.random.PCG64(sequence(seed, *names)))


def derive(seed: int, *names: str | int) -> int:
    """Return the seed of the stream called `names` as an integer in [0, 2**31), for libraries."""
    # The seed has 31 bits, because the seed in Unity's protocol is an int32.
    return int(sequence(seed, *names).generate_state(1, np.uint32)[0] >> 1)


def of_behavior(seed: int, name: str, listed: Iterable[str]) -> int:
    """Return the seed of a behavior, so that behaviors of a run do not share streams.

    Args:
        seed: seed of the run.
        name: name of the behavior.
        listed: behaviors in the configuration; if `name` is the only one, it gets the run's seed.
    """
    return seed if list(listed) == [name] else derive(seed, "behavior", name)
