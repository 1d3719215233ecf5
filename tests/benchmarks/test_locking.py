"""The environment `Lock`, on which RND is compared."""

import locking
import numpy as np


def chance_of_opening() -> float:
    """Return the chance that an episode opens the lock if every choice is right."""
    n_dials = len(locking.CODE)
    at = np.eye(n_dials + 1)[0]  # probability of each dial; the last entry is the open lock
    for _ in range(locking.MAX_STEP):
        then = np.zeros_like(at)
        then[-1] = at[-1]
        for dial in range(n_dials):
            then[dial + 1] += (1.0 - locking.SLIP) * at[dial]
            then[max(dial - 1, 0)] += locking.SLIP * at[dial]
        at = then
    return float(at[-1])


def test_optimal_policy_solves_the_lock_environment_as_often_as_documented():
    assert round(chance_of_opening(), 3) == 0.969
    opened, n = 0, 2000
    lock = locking.gymnasium.make("Lock-v0")
    obs, _ = lock.reset(seed=1)
    for _ in range(n):
        over = False
        while not over:
            dial = int(np.argmax(obs))
            obs, reward, terminated, truncated, _ = lock.step(np.int64(locking.CODE[dial]))
            over = terminated or truncated
        opened += int(reward)
        obs, _ = lock.reset()
    spread = (0.969 * 0.031 / n) ** 0.5
    assert abs(opened / n - 0.969) < 4 * spread
    lock.close()
    lock = locking.Lock()
    lock.reset(seed=1)
    lock._dial = 5
    lock.step(np.int64((locking.CODE[5] + 1) % locking.N_CHOICES))
    assert lock._dial == 4, "a wrong choice leads back"
