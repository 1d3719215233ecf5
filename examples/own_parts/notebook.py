# %% [markdown]
# # An environment, an encoder and a callback of one's own
# Run it in this folder: `python notebook.py`, or cell by cell in an editor that knows the percent
# format. `with_sb3.py` does the same with Stable-Baselines3; both use the classes of `parts.py`.

# %%
import matplotlib.pyplot as plt
from parts import Reach

import pipeline

network = {"hidden_units": 64, "encoder": "parts:Encoder"}
ppo = {"batch_size": 240, "buffer_size": 1920, "num_epoch": 10, "learning_rate": 1e-3}
settings = {"trainer_type": "ppo", "hyperparameters": ppo, "network_settings": network}
settings |= {"max_steps": 80_000, "summary_freq": 2400}
RETURN = "Environment/Cumulative Reward"


class StopAndDraw(pipeline.Callback):
    def on_summary(self, behavior, values, step):
        self.stop = values.get(RETURN, -100.0) > -12

    def on_end(self, result):
        plt.plot(*zip(*result.curves["Reach"][RETURN], strict=True))
        plt.savefig("curve.png")


# %% Train until the mean return is above -12, then evaluate
run = {"seed": 1, "run_dir": "runs/reach"}
result = pipeline.train(
    Reach, {"behaviors": {"Reach": settings}}, callbacks=[StopAndDraw()], force=True, **run
)
model = pipeline.export_policy(result.behaviors["Reach"].checkpoint, "runs")
episodes = pipeline.evaluate(model, Reach, episodes=50)
print(result.behaviors["Reach"].steps, sum(e.episode_return for e in episodes) / 50)

# %% Load the saved policy, and act in a loop with the environment itself
policy, env = pipeline.load_policy(model), Reach()
observation, _ = env.reset(seed=3)
truncated, total = False, 0.0
while not truncated:
    observation, reward, _, truncated, _ = env.step(policy.act(observation))
    total += reward
print(total)

# %% Continue the run to its last step
result = pipeline.train(Reach, {"behaviors": {"Reach": settings}}, resume=True, **run)
print(result.behaviors["Reach"].steps)
