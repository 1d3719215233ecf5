"""`threaded: true`: updates are spread over the steps of the loop that follow."""

import math
import signal
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from toys import Corridor

import pipeline
from pipeline.algos.ppo import PPO
from pipeline.algos.sac import SAC
from pipeline.core.specs import ActionSpec, BehaviorSpec, ObservationSpec
from pipeline.errors import Interrupted, TrainingError
from pipeline.settings import load_run_settings
from pipeline.trainer import updates as overlap_module
from pipeline.trainer.checkpoints.file import load_checkpoint
from pipeline.trainer.supported import algorithm_of
from pipeline.trainer.updates import Overlap

ALGORITHMS = {"ppo": PPO, "sac": SAC}


def checkpoint(tmp_path):
    return load_checkpoint(tmp_path / "Toy" / "checkpoint.pt")["learner"]


NOTHING_DONE = {"network": {"n_done": torch.tensor(0)}}


class Parts:
    """An algorithm whose updates have `n_parts` parts, and whose weights count the parts done."""

    def __init__(self, n_parts):
        network = torch.nn.Module()
        network.register_buffer("n_done", torch.tensor(0))
        self.networks = self.own_networks = {"network": network}
        self.n_parts = n_parts
        self.wait = lambda: None  # called in each part
        self.done = []
        self.observed = []

    def update_in_parts(self, rollout, *, step):
        for left in range(self.n_parts, 0, -1):
            yield left
            self.wait()
            self.done.append((rollout[0], self.n_parts - left))
            self.networks["network"].n_done += 1
        return {"n": float(self.n_parts), "step": float(step)}

    def weights(self):
        return {"network": {"n_done": torch.tensor(len(self.done))}}

    def copy_for_acting(self):
        return Parts(self.n_parts)

    def observe(self, obs):
        self.observed.append((len(self.done), obs))

    def state_dict(self):
        return {"done": list(self.done), "observed": list(self.observed)}

    def load_state_dict(self, state):
        self.done, self.observed = list(state["done"]), list(state["observed"])


class Rows(list):
    """A rollout whose rows are the items of the list."""

    @property
    def n_rows(self):
        return len(self)


def advanced(overlap):
    """Advance the update by one step; return its statistics, empty if it is not complete."""
    overlap.advance()
    return overlap.take()


def begun(n_parts, *, n_steps, steps_per_row=None, wait=lambda: None):
    """Begin an update of `n_parts` parts, on a rollout of two rows that took `n_steps` steps."""
    overlap = Overlap(Parts(n_parts), steps_per_row=steps_per_row)
    overlap.algorithm.wait = wait
    for _ in range(n_steps):
        assert advanced(overlap) == {}
    assert overlap.start(Rows([7, 7]), step=3)
    return overlap


@pytest.mark.parametrize(
    ("n_parts", "n_steps"), [(1, 9), (9, 10), (10, 5), (11, 5), (24, 3), (10, 0)]
)
def test_parts_of_an_update_are_spread_over_as_many_steps_as_the_rollout_took(n_parts, n_steps):
    overlap = begun(n_parts, n_steps=n_steps)
    learner, per_step = overlap.algorithm, math.ceil(n_parts / max(n_steps, 1))
    counts = []
    while not (stats := advanced(overlap)):
        counts.append(len(learner.done))
        assert overlap.acting is not learner
        assert overlap.weights() == NOTHING_DONE
    assert stats == {"n": float(n_parts), "step": 3.0}
    assert overlap.acting is learner
    assert len(counts) <= n_steps
    assert counts == [min(per_step * (i + 1), n_parts) for i in range(len(counts))]
    assert not overlap.is_under_way


def test_update_that_yields_0_remaining_parts_ends_after_a_step():
    """An algorithm of a plug-in may yield 0, because the numbers of parts are estimates."""

    class Vague(Parts):
        def update_in_parts(self, rollout, *, step):
            yield 0
            return {"n": float(len(rollout)), "step": float(step)}

    overlap = Overlap(Vague(1))
    assert overlap.start(Rows([7, 7]), step=3)
    assert advanced(overlap) == {"n": 2.0, "step": 3.0}


@pytest.mark.parametrize("seconds", [0.0, 0.02])
@pytest.mark.parametrize(("n_steps", "after"), [(3, 3), (9, 4)])
def test_step_at_which_a_threaded_update_takes_effect_does_not_depend_on_its_duration(
    n_steps, after, seconds
):
    """The loop waits for the thread, however long the thread computes."""
    overlap = begun(5, n_steps=n_steps, steps_per_row=1.8, wait=lambda: time.sleep(seconds))
    overlap.observe("a")
    for _ in range(after - 1):
        assert advanced(overlap) == {}
        assert overlap.acting is not overlap.algorithm
        assert overlap.weights() == NOTHING_DONE
    assert advanced(overlap) == {"n": 5.0, "step": 3.0}
    assert overlap.acting is overlap.algorithm
    assert overlap.algorithm.done == [(7, k) for k in range(5)]
    assert overlap.algorithm.observed == [(5, "a")]


def test_method_advance_returns_while_the_thread_still_computes_the_update():
    may_end = threading.Event()
    overlap = begun(1, n_steps=3, steps_per_row=1.0, wait=may_end.wait)
    assert advanced(overlap) == {}  # returns only if it does not wait for the thread
    assert overlap.algorithm.done == []
    may_end.set()
    assert overlap.take(at_once=True) == {"n": 1.0, "step": 3.0}
    assert overlap.algorithm.done == [(7, 0)]


def test_function_steps_per_row_counts_the_weights_and_returns_none_for_short_gradient_steps():
    spec = BehaviorSpec([ObservationSpec.vector(8)], ActionSpec(2, ()))
    per_row = []
    for trainer, rows, units in (
        ("ppo", 64, 128),
        ("ppo", 256, 512),
        ("poca", 2048, 128),
        ("sac", 2048, 512),
    ):
        behavior = {
            "trainer_type": trainer,
            "hyperparameters": {"batch_size": rows, "buffer_size": 10 * rows},
            "network_settings": {"hidden_units": units},
        }
        run = load_run_settings(None, overrides={"behaviors": {"B": behavior}})
        settings = run.behaviors["B"]
        algorithm = algorithm_of(settings)(spec, settings, seed=1, device=torch.device("cpu"))
        per_row.append(overlap_module.steps_per_row(algorithm))
    assert [value is None for value in per_row] == [True, False, False, True]
    n_weights = 2 * (9 * 512 + 513 * 512) + 2 * 513 + 2 + 513  # actor, critic, and their heads
    assert per_row[1] == pytest.approx(3 * n_weights / overlap_module.PER_STEP)


def test_method_take_with_at_once_completes_the_remaining_parts_of_an_update():
    overlap = begun(10, n_steps=20)
    overlap.advance()
    assert overlap.take(at_once=True) == {"n": 10.0, "step": 3.0}
    assert len(overlap.algorithm.done) == 10
    assert overlap.acting is overlap.algorithm


@pytest.mark.parametrize("per_row", [None, 3.0])
def test_update_under_way_learns_from_a_copy_of_its_rollout(per_row):
    """The memory of the rollout is overwritten by the next rollout."""
    rows = Rows([np.array([7.0])])
    overlap = Overlap(Parts(3), steps_per_row=per_row)
    overlap.algorithm.wait = lambda: rows[0].fill(0.0)
    for _ in range(3):
        overlap.advance()
    overlap.start(rows, step=3)
    while not advanced(overlap):
        pass
    assert [float(row[0]) for row, _ in overlap.algorithm.done] == [7.0] * 3


def test_normalizers_observe_rows_after_the_update_in_the_order_in_which_the_rows_arrived():
    overlap = begun(3, n_steps=3)
    overlap.observe("a")
    overlap.advance()
    overlap.observe("b")
    assert overlap.algorithm.observed == []
    while not advanced(overlap):
        pass
    overlap.observe("c")
    assert overlap.algorithm.observed == [(3, "a"), (3, "b"), (3, "c")]


@pytest.mark.parametrize("per_row", [None, 1.4])
@pytest.mark.parametrize("n_advanced", range(6))
@pytest.mark.parametrize(("n_parts", "n_steps"), [(5, 9), (5, 5), (11, 4)])
def test_saving_does_not_change_the_step_at_which_an_update_under_way_takes_effect(
    n_advanced, n_parts, n_steps, per_row
):
    untouched, saved = (begun(n_parts, n_steps=n_steps, steps_per_row=per_row) for _ in range(2))
    for overlap in (untouched, saved):
        for _ in range(n_advanced):
            advanced(overlap)
    restored = Overlap(Parts(n_parts), steps_per_row=per_row)
    restored.load_state_dict(saved.state_dict())
    for _ in range(12):
        stats = [advanced(run) for run in (untouched, saved, restored)]
        assert stats[0] == stats[1] == stats[2]
        acts = [run.acting is run.algorithm for run in (untouched, saved, restored)]
        assert acts[0] == acts[1] == acts[2]
    assert untouched.algorithm.done == restored.algorithm.done


def test_updated_policy_acts_from_the_next_step_if_the_checkpoint_has_no_step_counts():
    overlap = Overlap(Parts(2))
    earlier = {"weights": NOTHING_DONE, "stats": {"n": 2.0}}
    overlap.load_state_dict({"done": [1], "observed": [], "threaded": earlier})
    assert overlap.acting is not overlap.algorithm
    assert advanced(overlap) == {"n": 2.0}
    assert overlap.acting is overlap.algorithm


def test_run_with_threaded_updates_learns_the_corridor_and_saves_its_last_step(
    quick, tmp_path, in_process, recorder
):
    """An untrained policy gets a mean reward of at most 0.5 in the corridor."""
    settings = quick(
        threaded=True,
        hyperparameters={"batch_size": 64, "buffer_size": 512, "learning_rate": 2e-3},
        network_settings={"hidden_units": 32, "num_layers": 2},
        reward_signals={"extrinsic": {"gamma": 0.95}},
        max_steps=16_000,
        time_horizon=32,
    )
    env = in_process(Corridor())
    result = pipeline.train(env, settings, seed=1, run_dir=tmp_path, sinks=[recorder])
    assert result.behaviors["Toy"].mean_reward > 0.9
    assert result.behaviors["Toy"].n_updates > 20
    assert any("Losses/Value Loss" in values for _, _, values in recorder.rows)
    assert checkpoint(tmp_path)["step"] == result.behaviors["Toy"].steps


@pytest.mark.parametrize("trainer_type", ["ppo", "sac", "poca"])
def test_loop_continues_to_step_the_environment_while_an_update_is_under_way(
    trainer_type, quick, monkeypatch, train_in
):
    toy = Corridor(n_agents=4)
    under_way = []
    advance = Overlap.advance

    def noted(self):
        under_way.append(self.is_under_way)
        return advance(self)

    monkeypatch.setattr(Overlap, "advance", noted)
    hyperparameters = {"batch_size": 16, "buffer_size": 128}
    settings = quick(threaded=True, trainer_type=trainer_type, hyperparameters=hyperparameters)
    train_in(toy, settings)
    assert sum(under_way) > 20
    assert sum(np.diff(under_way)) > 2, "updates begin and end"


@pytest.mark.parametrize("longest", [0, overlap_module.PER_STEP])
def test_error_in_a_threaded_update_names_the_behavior_and_keeps_the_checkpoint(
    longest, quick, tmp_path, monkeypatch, train_in
):
    monkeypatch.setattr(overlap_module, "PER_STEP", longest or 1)
    learn = PPO.learn_minibatch

    def fails(self, batch, **more):
        if fails.n > 10:
            raise TrainingError("step 7: the PPO loss is not finite")
        fails.n += 1
        return learn(self, batch, **more)

    fails.n = 0
    monkeypatch.setattr(PPO, "learn_minibatch", fails)
    with pytest.raises(TrainingError, match=r"^behavior Toy, step [0-9]+: the PPO loss"):
        train_in(Corridor(n_agents=4), quick(threaded=True, max_steps=5000), resume_interval_s=0.0)
    assert 0 < checkpoint(tmp_path)["step"] < 5000


@pytest.mark.parametrize(("longest", "is_compiled"), [(overlap_module.PER_STEP, True), (1, False)])
def test_gradient_steps_in_a_thread_are_not_compiled(
    longest, is_compiled, quick, monkeypatch, train_in
):
    """torch can trace only one program at a time, and two behaviors have two threads."""
    compiled = []
    monkeypatch.setattr(PPO, "compile", lambda self: compiled.append(self.spec))
    monkeypatch.setattr(overlap_module, "PER_STEP", longest)
    settings = quick(threaded=True, max_steps=100)
    settings = replace(settings, torch_settings=replace(settings.torch_settings, compile=True))
    train_in(Corridor(), settings)
    assert bool(compiled) == is_compiled


def test_interrupted_run_saves_a_partial_update_and_the_resumed_run_continues_the_update(
    quick, tmp_path, in_process, monkeypatch, train_in
):
    settings = quick(threaded=True, max_steps=800)
    advance = Overlap.advance

    def interrupting(self):
        if self.is_under_way and not interrupting.done:
            interrupting.done = True
            signal.raise_signal(signal.SIGINT)
        return advance(self)

    interrupting.done = False
    monkeypatch.setattr(Overlap, "advance", interrupting)
    with pytest.raises(Interrupted, match="state is saved"):
        train_in(Corridor(n_agents=4), settings)
    saved = checkpoint(tmp_path)
    assert saved["algorithm"]["optimizer"]["state"][0]["step"] == 4  # minibatches of one update
    env = in_process(Corridor(n_agents=4))
    resumed = pipeline.train(env, settings, seed=1, run_dir=tmp_path, resume=True)
    assert resumed.behaviors["Toy"].steps >= 800


def test_updates_are_not_spread_over_several_steps_by_default(quick, monkeypatch, train_in):
    monkeypatch.setattr(Overlap, "start", None)
    result = train_in(Corridor(n_agents=4), quick())
    assert result.behaviors["Toy"].n_updates > 0
