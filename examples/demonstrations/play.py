"""Write play.csv: forty games of CartPole by players who press the wrong key more and more often.

It stands for what a game of your own writes down. Any names of columns will do.
"""

import csv
from pathlib import Path

import gymnasium
import numpy as np

GAMES = 40

env, rng = gymnasium.make("CartPole-v1"), np.random.default_rng(0)
with Path("play.csv").open("w", newline="", encoding="utf-8") as file:
    rows = csv.writer(file)
    rows.writerow(["game", "x", "speed", "angle", "turn", "key", "points", "fell"])
    for game in range(1, GAMES + 1):
        obs, _ = env.reset(seed=game)
        fell = late = False
        while not (fell or late):
            right = obs[2] + 0.5 * obs[3] + 0.1 * obs[1] > 0
            key = int(right) if rng.random() > 0.02 * game else int(rng.integers(2))
            seen = obs
            obs, points, fell, late, _ = env.step(key)
            rows.writerow([game, *seen, key, points, int(fell)])
