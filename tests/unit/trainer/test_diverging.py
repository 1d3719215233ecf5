"""Non-finite numbers stop the run with a message; the last finite checkpoint stays."""

import re

import numpy as np
import pytest
import torch
from toys import Chase

import pipeline
from pipeline.algos.ppo import PPO
from pipeline.errors import PipelineError
from pipeline.trainer.checkpoints.file import load_checkpoint

AT_STEP = 100


class Failing(Chase):
    """Sends NaN in one place from the 100th step on."""

    def __init__(self, place) -> None:
        super().__init__(n_agents=4)
        self.where = place
        self.n_steps = 0

    def step(self, actions):
        self.n_steps += 1
        ((name, (decisions, terminals)),) = super().step(actions).items()
        if self.n_steps >= AT_STEP:
            steps, field = self.where.split()
            values = getattr({"decision": decisions, "terminal": terminals}[steps], field)
            (values[0] if field == "obs" else values)[:] = np.nan
        return {name: (decisions, terminals)}


def spoil_loss(algorithm):
    algorithm.critic.heads.bias.data[:] = torch.nan


def spoil_gradient(algorithm):
    algorithm.policy.actor.heads.mu.weight.register_hook(lambda gradient: gradient * torch.inf)


def spoil_weights(algorithm):
    step = algorithm.optimizer.step

    def overflowing(**options):
        step(**options)
        algorithm.critic.heads.weight.data[:] = torch.inf

    algorithm.optimizer.step = overflowing


def tensors(value):
    if isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors(item)
    elif isinstance(value, torch.Tensor):
        yield value


def run(env, settings, tmp_path, pattern):
    with pytest.raises(PipelineError) as caught:
        pipeline.train(env, settings, seed=1, run_dir=tmp_path, resume_interval_s=0.0)
    message = str(caught.value)
    assert re.search(pattern, message), message
    assert re.search(r"behavior Toy|of Toy", message), message
    assert re.search(r"step [1-9][0-9]+", message), message
    assert "\n" not in message
    assert caught.value.exit_code == 2
    state = load_checkpoint(tmp_path / "Toy" / "checkpoint.pt")["learner"]
    assert state["step"] > 100
    assert all(values.isfinite().all() for values in tensors(state["algorithm"]))


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(
    ("where", "wanted"),
    [
        ("decision obs", "observation 0 has a number that is not finite"),
        ("terminal obs", "observation 0 that is not finite"),
        ("decision reward", "a reward that is not finite"),
        ("terminal group_reward", "a reward that is not finite"),
    ],
)
def test_nan_from_an_environment_stops_the_run_and_keeps_a_finite_checkpoint(
    where, wanted, normalize, quick, tmp_path, in_process
):
    network = {"hidden_units": 8, "num_layers": 1, "normalize": normalize}
    settings = quick(max_steps=5000, network_settings=network)
    run(in_process(Failing(where)), settings, tmp_path, wanted)
    env = in_process(Chase(n_agents=4))
    resumed = pipeline.train(
        env, quick(network_settings=network), seed=1, run_dir=tmp_path, resume=True
    )
    assert resumed.behaviors["Toy"].steps >= 500


class Huge(Chase):
    """From step 200 on: observations with infinite squares, or rewards with an infinite sum."""

    n_steps = 0
    what = "obs"

    def step(self, actions):
        self.n_steps += 1
        ((name, (decisions, terminals)),) = super().step(actions).items()
        for steps in (decisions, terminals) if self.n_steps >= 2 * AT_STEP else ():
            if self.what == "obs":
                steps.obs[0][:] = np.sign(steps.obs[0]) * 3e19
            else:
                steps.reward[:] = 3e38
        return {name: (decisions, terminals)}


REPLAY = {"batch_size": 16, "buffer_init_steps": 32}


@pytest.mark.parametrize("threaded", [False, True])
@pytest.mark.parametrize(
    ("trainer", "what"),
    [("ppo", "obs"), ("sac", "obs"), ("ppo", "reward"), ("poca", "reward"), ("sac", "reward")],
)
def test_huge_numbers_that_overflow_in_training_stop_the_run(
    trainer, what, threaded, quick, tmp_path, in_process
):
    """Adam's means of squares overflow while losses and weights are still finite."""
    changes = {"hyperparameters": REPLAY} if trainer == "sac" else {}
    settings = quick(trainer_type=trainer, max_steps=5000, threaded=threaded, **changes)
    huge = Huge(n_agents=4)
    huge.what = what
    run(in_process(huge), settings, tmp_path, "is not finite")


def test_training_with_huge_observations_stays_finite_if_observations_are_normalized(
    quick, tmp_path, train_in
):
    network = {"hidden_units": 8, "num_layers": 1, "normalize": True}
    settings = quick(max_steps=2000, network_settings=network)
    train_in(Huge(n_agents=4), settings)
    assert load_checkpoint(tmp_path / "Toy" / "checkpoint.pt")["learner"]["step"] >= 2000


@pytest.mark.parametrize("where", ["exp_avg", "exp_avg_sq"])
def test_error_names_the_non_finite_tensor_of_the_optimizer(
    where, quick, tmp_path, in_process, monkeypatch
):
    update = PPO.update

    def spoiling(self, rollout, *, step):
        stats = update(self, rollout, step=step)
        if step > 300:
            self.optimizer._state[0][where][3] = torch.inf
        return stats

    monkeypatch.setattr(PPO, "update", spoiling)
    pattern = rf"learner\.algorithm\.optimizer\.state\.0\.{where} is not finite and is not saved"
    run(in_process(Chase(n_agents=4)), quick(max_steps=5000), tmp_path, pattern)


@pytest.mark.parametrize("threaded", [False, True])
@pytest.mark.parametrize(
    ("spoil", "wanted"),
    [
        (spoil_loss, "the PPO loss is not finite"),
        (spoil_gradient, r"the PPO gradient of policy\.actor\.heads\.mu\.weight is not finite"),
        (spoil_weights, r"the PPO weight of critic\.heads\.weight is not finite"),
    ],
)
def test_non_finite_loss_gradient_or_weight_stops_the_run(
    spoil, wanted, threaded, quick, tmp_path, in_process, monkeypatch
):
    parts = PPO.update_in_parts

    def spoiling(self, rollout, *, step):
        if step > 300:
            spoil(self)
        return parts(self, rollout, step=step)

    monkeypatch.setattr(PPO, "update_in_parts", spoiling)
    hyperparameters = {"batch_size": 128, "buffer_size": 128, "num_epoch": 1}
    settings = quick(max_steps=5000, hyperparameters=hyperparameters, threaded=threaded)
    run(in_process(Chase(n_agents=4)), settings, tmp_path, wanted)
