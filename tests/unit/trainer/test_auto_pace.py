"""`steps_per_update: auto` becomes a number before the first update, and changes nothing else."""

import logging
from dataclasses import replace

import pytest
import torch
from in_turn import InTurn
from toys import Chase, Forbidden

from pipeline import trainer
from pipeline.algos.sac import SAC
from pipeline.errors import SettingsError
from pipeline.settings.pace import MOST
from pipeline.tracking.base import Callback
from pipeline.trainer import pace as pace_module
from pipeline.trainer import timing
from pipeline.trainer.checkpoints.file import digest, load_checkpoint
from pipeline.trainer.distributed.sync import refuse_unshareable

REPLAY = {"batch_size": 16, "buffer_size": 300, "buffer_init_steps": 40, "save_replay_buffer": True}
SIGNALS = {"reward_signals": {"extrinsic": {}, "rnd": {"network_settings": {"hidden_units": 8}}}}
MEMORY = {"hidden_units": 8, "memory": {"memory_size": 8, "sequence_length": 4}}
RUNS = {
    "sac": (Chase, {"trainer_type": "sac"}),
    "sac, threaded, with a signal": (Chase, {"trainer_type": "sac", "threaded": True, **SIGNALS}),
    "sac, with memory": (Chase, {"trainer_type": "sac", "network_settings": MEMORY}),
    "xqc": (Chase, {"trainer_type": "xqc"}),
    "xqc, choices, from the first row on": (
        Forbidden,
        {"trainer_type": "xqc", "time_horizon": 1, "hyperparameters": {"buffer_init_steps": 0}},
    ),
}


@pytest.fixture
def fixed(monkeypatch):
    """Fix the measured times: 3 ms of waiting in each exchange, and 9 ms for an update."""
    measured = pace_module.gradient_step_seconds

    def measure(*arguments, **options):
        assert measured(*arguments, **options) > 0
        return 9e-3

    monkeypatch.setattr(pace_module, "gradient_step_seconds", measure)
    exchanged = pace_module.PaceMeter.exchanged
    waits = iter(range(1, 100_000))
    monkeypatch.setattr(
        pace_module.PaceMeter, "exchanged", lambda meter, _: exchanged(meter, 3e-3 * next(waits))
    )
    monkeypatch.setattr(pace_module.machine, "n_processors", lambda: 4)


class Told(Callback):
    """Keeps the settings of the run that have no `auto`."""

    def __init__(self, now=lambda: ()):
        self.settings, self.times, self._now = [], [], now

    def on_settings(self, settings):
        if not settings.undecided():
            self.settings.append(settings)
            self.times.append(self._now())


@pytest.fixture
def run(quick, in_process, tmp_path):
    def train(toy, changes, name, pace, *, resume=False, told=None):
        own = changes.get("hyperparameters", {})
        hyperparameters = {"hyperparameters": REPLAY | {"steps_per_update": pace} | own}
        settings = quick(**{"max_steps": 200} | changes | hyperparameters)
        folder, env = tmp_path / name, in_process(toy(seed=3, n_agents=2))
        job = trainer.JobSpec(env, settings, seed=1, run_dir=folder, resume=resume)
        result = trainer.train(job, callbacks=[told or Told()])
        return load_checkpoint(result.behaviors["Toy"].checkpoint)

    return train


def without_clock(state):
    return digest({key: value for key, value in state.items() if key != "run"})


@pytest.mark.parametrize(("toy", "changes"), RUNS.values(), ids=RUNS)
def test_run_with_steps_per_update_auto_equals_a_run_that_starts_with_the_chosen_number(
    toy, changes, run, fixed, caplog
):
    caplog.set_level(logging.INFO)
    told = Told()
    before = torch.random.get_rng_state()
    chosen = run(toy, changes, "auto", "auto", told=told)
    assert torch.equal(before, torch.random.get_rng_state())
    (settings,) = told.settings
    pace = settings.behaviors["Toy"].hyperparameters.steps_per_update
    written = chosen["settings"]["hyperparameters"]
    assert written["steps_per_update"] == pace
    lines = [r.getMessage() for r in caplog.records if "steps_per_update" in r.getMessage()]
    assert len(lines) == 1
    assert f"Toy: steps_per_update is {pace:g} from now on: an exchange takes" in lines[0]
    assert "of which 3.0 ms are spent waiting, and an update 9.0 ms" in lines[0]
    assert chosen["learner"]["algorithm"]["n_updates"] > 1
    assert without_clock(run(toy, changes, "number", pace)) == without_clock(chosen)


def test_log_recommends_threaded_updates_if_rows_arrive_in_long_trajectories(run, fixed, caplog):
    caplog.set_level(logging.INFO)
    state = run(Chase, {"trainer_type": "sac", "time_horizon": 20}, "apart", "auto")
    assert "threaded: true would allow" in caplog.text
    spread = run(Chase, {"trainer_type": "sac", "time_horizon": 20, "threaded": True}, "b", "auto")
    paces = [s["settings"]["hyperparameters"]["steps_per_update"] for s in (state, spread)]
    assert paces[0] > 4 * paces[1]
    assert caplog.text.count("threaded: true would allow") == 1


@pytest.mark.parametrize("trainer_type", ["sac", "xqc"])
def test_resumed_run_keeps_the_steps_per_update_of_its_checkpoint(
    trainer_type, run, fixed, monkeypatch
):
    changes = {"trainer_type": trainer_type}
    whole = run(Chase, changes, "whole", "auto")
    half = run(Chase, changes | {"max_steps": 100}, "halves", "auto")
    for state in (half, whole):
        assert state["settings"]["hyperparameters"]["steps_per_update"] < MOST
    monkeypatch.setattr(pace_module, "gradient_step_seconds", None)  # fails if measured again
    told = Told()
    resumed = run(Chase, changes, "halves", "auto", resume=True, told=told)
    paces = [s["settings"]["hyperparameters"]["steps_per_update"] for s in (half, resumed)]
    assert paces == [told.settings[0].behaviors["Toy"].hyperparameters.steps_per_update] * 2
    changed = run(Chase, changes | {"max_steps": 300}, "halves", 5.0, resume=True)
    assert changed["settings"]["hyperparameters"]["steps_per_update"] == 5.0


def test_behaviors_without_their_own_settings_share_the_chosen_steps_per_update(
    in_process, quick, tmp_path, fixed
):
    settings = quick(trainer_type="sac", hyperparameters=REPLAY | {"steps_per_update": "auto"})
    settings = replace(settings, default_settings=settings.behaviors["Toy"], behaviors={})
    told = Told()
    job = trainer.JobSpec(in_process(Chase(n_agents=2)), settings, seed=1, run_dir=tmp_path)
    trainer.train(job, callbacks=[told])
    (decided,) = told.settings
    assert not decided.behaviors
    assert not decided.default_settings.is_undecided


def test_steps_per_update_auto_is_refused_for_several_learners(quick):
    settings = quick(trainer_type="sac", hyperparameters={"steps_per_update": "auto"})
    with pytest.raises(SettingsError, match="auto is measured in one process; give a number"):
        refuse_unshareable("Toy", settings.behaviors["Toy"], 2)


class Clock:
    """A clock that advances only while an environment works or an update runs."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now

    thread_time = perf_counter


class Elsewhere(InTurn):
    """An environment that works for `seconds` of the clock after it has got actions."""

    def __init__(self, toy, clock, seconds):
        super().__init__(toy)
        self._clock, self._seconds, self._ready = clock, seconds, 0.0
        self.n_exchanges = 0

    def step_send(self):
        self._ready = self._clock.now + self._seconds

    def step_wait(self):
        self._clock.now = max(self._clock.now, self._ready)
        self.n_exchanges += 1
        super().step_wait()


@pytest.mark.parametrize(
    ("exchange_ms", "update_ms", "changes", "n_agents", "pace", "share"),
    [
        (14, 9, {"threaded": True}, 1, 1.0, 0.97),
        (14, 9, {"time_horizon": 1}, 1, 1.0, 0.99),
        (14, 9, {}, 1, 4.0, 0.99),
        (14, 3, {"threaded": True}, 1, 0.25, 0.97),
        (14, 13.5, {"threaded": True}, 1, 1.07, 0.97),
        (14, 28, {"threaded": True}, 1, 2.22, 0.66),
        (30, 9, {"threaded": True}, 1, 0.333, 0.93),
        (6, 9, {"threaded": True}, 1, 1.67, 0.75),
        (6, 9, {"threaded": True}, 12, 20.0, 0.75),
        (0.1, 9, {"threaded": True}, 1, 64.0, 0.4),
    ],
)
def test_exchanges_keep_the_expected_share_of_their_rate_with_the_automatic_steps_per_update(
    exchange_ms, update_ms, changes, n_agents, pace, share, quick, tmp_path, monkeypatch
):
    """The rate of exchanges is compared with the rate without updates, by a simulated clock."""
    clock, learn = Clock(), SAC.learn_minibatch
    for module in (pace_module, timing):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(pace_module.machine, "n_processors", lambda: 2)

    def slow(algorithm, batch):
        clock.now += update_ms / 1e3
        return learn(algorithm, batch)

    monkeypatch.setattr(SAC, "learn_minibatch", slow)
    hyperparameters = REPLAY | {"steps_per_update": "auto"}
    more = {"trainer_type": "sac", "max_steps": 300 * n_agents, "time_horizon": 4, **changes}
    settings = quick(hyperparameters=hyperparameters, **more)
    environment = Elsewhere(Chase(seed=3, n_agents=n_agents), clock, exchange_ms / 1e3)
    told = Told(lambda: (clock.now, environment.n_exchanges))
    job = trainer.JobSpec(environment, settings, seed=1, run_dir=tmp_path)
    # No resume points by time, because saving completes an update that is under way.
    trainer.train(job, callbacks=[told], resume_interval_s=1e6)
    (decided,), ((began, n_before),) = told.settings, told.times
    assert decided.behaviors["Toy"].hyperparameters.steps_per_update == pytest.approx(pace, rel=0.1)
    per_exchange_ms = 1e3 * (clock.now - began) / (environment.n_exchanges - n_before)
    assert exchange_ms / per_exchange_ms >= share
