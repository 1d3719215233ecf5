# %% [markdown]
# # From an environment to a policy that Unity loads
#
# Trains a policy with PPO to balance a ball on a plate, looks at its learning curve, evaluates it
# and exports it, all through `import pipeline`. Run it cell by cell in an editor that knows the
# percent format, as a notebook (`jupytext --to ipynb examples/notebook.py`), or whole:
#
#     python examples/notebook.py
#
# It writes into the folder that the variable NOTEBOOK_FOLDER names, `runs/notebook` without it.

# %%
import os
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

import pipeline

folder = Path(os.environ.get("NOTEBOOK_FOLDER", "runs/notebook"))
environment = "balance_ball"  # as well: "gymnasium:CartPole-v1", the path of a Unity build, ...

# %% [markdown]
# ## What an environment says of itself

# %%
with pipeline.make_env(environment, seed=1) as env:
    env.reset()
    for behavior, spec in env.behavior_specs.items():
        decisions, _ = env.get_steps(behavior)
        print(behavior, [one.shape for one in spec.observation_specs], spec.action_spec)
        print(f"{len(decisions)} agents ask for a decision")

# %% [markdown]
# ## Train
#
# The settings are those of a trainer file of ML-Agents; `settings` may be the path of one.

# %%
settings = {
    "behaviors": {
        "3DBall": {
            "trainer_type": "ppo",
            "hyperparameters": {
                "batch_size": 64,
                "buffer_size": 6000,
                "learning_rate": 3.0e-4,
                "beta": 0.001,
                "lambd": 0.95,
                "num_epoch": 3,
            },
            "network_settings": {"normalize": True, "hidden_units": 128, "num_layers": 2},
            "max_steps": int(os.environ.get("NOTEBOOK_STEPS", "150000")),
            "time_horizon": 1000,
            "summary_freq": 5000,
        }
    }
}


class StopWhenGood(pipeline.Callback):
    """Ends the run when the mean reward has reached 95 of about 100."""

    def on_summary(self, behavior, values, step):
        self.stop = values.get("Environment/Cumulative Reward", 0.0) > 95


result = pipeline.train(
    environment,
    settings,
    seed=1,
    run_dir=folder,
    callbacks=[StopWhenGood()],
    force=True,  # run again, this cell keeps the earlier run in another folder
)
trained = result.behaviors["3DBall"]
print(f"{trained.steps} steps, {trained.n_updates} updates")

# %% [markdown]
# ## Its learning curve

# %%
curves = result.curves["3DBall"]
figure, axes = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
for axis, tag in zip(axes, ("Environment/Cumulative Reward", "Losses/Value Loss"), strict=True):
    steps, values = zip(*curves[tag], strict=True)
    axis.plot(steps, values)
    axis.set(xlabel="steps", title=tag)
figure.savefig(folder / "curves.png")

# %% [markdown]
# ## Export
#
# The file is compared with the policy before it takes its place; Unity loads it as it is.

# %%
model = pipeline.export_policy(trained.checkpoint, folder / "onnx")
print(model, model.stat().st_size, "bytes")

# %% [markdown]
# ## Evaluate the exported file, with episodes that training has not seen

# %%
episodes = pipeline.evaluate(model, environment, episodes=30, seed=10_000)
returns = np.array([one.episode_return for one in episodes])
print(f"return {returns.mean():.1f}, from {returns.min():.1f} to {returns.max():.1f}")

# %% [markdown]
# ## Act on arrays

# %%
observations = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
print(pipeline.load_policy(model).act(observations).continuous)
