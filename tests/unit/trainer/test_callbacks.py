"""Callbacks: what they may do, how many calls they add, and how their state is resumed."""

# ruff: noqa: ARG002  # callbacks get more arguments than they need

import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from stops_after import StopsAfter
from toys import Chase

import pipeline
from pipeline.envs.in_process import InProcessEnvironment
from pipeline.errors import Interrupted, SettingsError, TrainingError
from pipeline.tracking.base import Callback, Sink
from pipeline.trainer import api
from pipeline.trainer.checkpoints.file import load_checkpoint

RATE = "Policy/Learning Rate"


class Halves(Callback):
    """Halves the learning rate every third update, and logs how many updates it has seen."""

    def __init__(self):
        self.n_updates, self.rate = 0, 1e-3

    def on_start(self, behavior, settings):
        self.rate = settings["hyperparameters"]["learning_rate"]

    def on_update(self, behavior, update):
        self.n_updates += 1
        if self.n_updates % 3 == 0:
            self.rate /= 2
            self.set("learning_rate", self.rate)
        self.log("Halves/Updates", self.n_updates)

    def state_dict(self):
        return {"n_updates": self.n_updates, "rate": self.rate}

    def load_state_dict(self, state):
        self.n_updates, self.rate = state["n_updates"], state["rate"]


def train(quick, folder, *, callbacks=(), changes=None, **options):
    env = InProcessEnvironment(Chase(seed=3, n_agents=4))
    settings = quick(**(changes or {}))
    options = {"resume_interval_s": 0.0} | options
    return pipeline.train(env, settings, seed=1, run_dir=folder, callbacks=callbacks, **options)


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("Toy/*.pt")}


KINDS = {
    "ppo": {},
    "in parts": {"threaded": True},
    "sac": {
        "trainer_type": "sac",
        "hyperparameters": {
            "batch_size": 16,
            "buffer_size": 300,
            "buffer_init_steps": 40,
            "steps_per_update": 4,
            "save_replay_buffer": True,
        },
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_stopped_and_resumed_run_with_a_stateful_callback_writes_the_same_bytes(
    kind, quick, tmp_path, monkeypatch
):
    changes = KINDS[kind]
    whole = train(quick, tmp_path / "whole", callbacks=[Halves()], changes=changes)
    with monkeypatch.context() as patch:
        patch.setattr(api, "stop_on_signal", lambda: nullcontext(StopsAfter(70)))
        with pytest.raises(Interrupted):
            train(quick, tmp_path / "parts", callbacks=[Halves()], changes=changes)
    saved = load_checkpoint(tmp_path / "parts/Toy/checkpoint.pt")
    assert 0 < saved["learner"]["step"] < 500
    state = saved["run"]["callbacks"]["states"]["Halves 0"]
    assert state["n_updates"] > 0
    again = Halves()
    resumed = train(quick, tmp_path / "parts", callbacks=[again], changes=changes, resume=True)
    assert files_of(tmp_path / "parts") == files_of(tmp_path / "whole")
    assert again.n_updates == whole.behaviors["Toy"].n_updates > state["n_updates"]
    assert len(set(dict(whole.curves["Toy"][RATE]).values())) > 1
    assert resumed.curves["Toy"]["Halves/Updates"][-1] == whole.curves["Toy"]["Halves/Updates"][-1]


def test_callbacks_without_state_do_not_change_the_bytes_of_checkpoints(quick, tmp_path):
    train(quick, tmp_path / "with", callbacks=[Empty()])
    train(quick, tmp_path / "without")
    assert files_of(tmp_path / "with") == files_of(tmp_path / "without")


METHODS = ("on_start", "on_exchange", "on_update", "on_summary", "on_checkpoint")
Empty = type("Empty", (Callback,), dict.fromkeys(METHODS, lambda *_: None))


class Counted(Sink):
    """Counts the calls of all functions, of any module, between the first two summaries."""

    def __init__(self):
        self.n_calls, self.n_summaries = 0, 0

    def on_summary(self, behavior, values, step):
        self.n_summaries += 1
        sys.setprofile(self.count if self.n_summaries == 1 else None)

    def count(self, frame, event, _):
        self.n_calls += event in ("call", "c_call")


def test_callbacks_with_empty_methods_add_less_than_one_percent_to_the_function_calls_of_a_run(
    quick, tmp_path
):
    counts = []
    before = sys.getprofile()
    for callbacks in ([], [Empty()]):
        counted = Counted()
        try:
            folder = tmp_path / str(len(callbacks))
            train(quick, folder, callbacks=callbacks, sinks=[counted], resume_interval_s=1e6)
        finally:
            sys.setprofile(before)
        counts.append(counted.n_calls)
    assert counts[0] > 10_000
    assert 0 <= counts[1] - counts[0] < 0.01 * counts[0], counts


def test_on_exchange_receives_the_steps_and_episodes_of_each_behavior(quick, tmp_path):
    class Noted(Callback):
        seen = []  # noqa: RUF012  # the class has only one object

        def on_exchange(self, steps, n_episodes):
            self.seen.append((steps["Toy"], n_episodes["Toy"]))

    result = train(quick, tmp_path, callbacks=[Noted()])
    assert len(Noted.seen) == result.n_exchanges
    assert Noted.seen == sorted(Noted.seen)
    assert Noted.seen[-1] == (result.behaviors["Toy"].steps, result.behaviors["Toy"].n_episodes)


def test_value_that_a_callback_sets_replaces_the_schedule_until_the_callback_removes_the_value(
    quick, tmp_path
):
    rates = []

    class Sets(Callback):
        def on_update(self, behavior, update):
            rates.append(update.statistics[RATE])
            self.set("learning_rate", 5e-4 if len(rates) == 1 else None)

    train(quick, tmp_path, callbacks=[Sets()])
    assert rates[0] < 3e-4
    assert rates[1] == 5e-4
    assert rates[2] < rates[0]


def test_numbers_and_pictures_that_a_callback_logs_reach_the_sinks(quick, tmp_path):
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    class Draws(Callback):
        def on_summary(self, behavior, values, step):
            self.log("Draws/Step", step)
            self.log_image("Draws/Red", np.full((4, 6, 3), (255, 0, 0), np.uint8))

    result = train(quick, tmp_path, callbacks=[Draws()], sinks=["tensorboard"])
    # A number that is logged at a summary is in the next summary.
    assert result.curves["Toy"]["Draws/Step"] == [
        (step + 100, step) for step in (100, 200, 300, 400)
    ]
    (path,) = (tmp_path / "Toy").glob("events.out.tfevents.*")
    pictures = [
        value.image
        for event in LegacyEventFileLoader(str(path)).Load()
        for value in event.summary.value
        if value.tag == "Draws/Red"
    ]
    assert [(one.height, one.width, one.colorspace) for one in pictures] == [(4, 6, 3)] * 5
    assert pictures[0].encoded_image_string.startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("method", "arguments", "options", "said"),
    [
        ("log_image", ("x", np.zeros((4, 4), np.uint8)), {}, "x is not a uint8 array"),
        ("log", ("x", 1.0), {"behavior": "Other"}, "no behavior 'Other'; use one of"),
        ("set", ("gamma", 0.9), {}, "'gamma' of Toy: only learning_rate, epsilon, beta can be"),
        ("set", ("epsilon", np.nan), {}, "epsilon is nan; give a finite number of at least 0"),
    ],
)
def test_mistake_in_a_callback_raises_an_error_that_names_the_mistake(
    method, arguments, options, said, quick, tmp_path
):
    class Wrong(Callback):
        def on_start(self, behavior, settings):
            getattr(self, method)(*arguments, **options)

    with pytest.raises(SettingsError, match=said):
        train(quick, tmp_path, callbacks=[Wrong()])


def test_callback_state_that_a_checkpoint_cannot_store_ends_the_run(quick, tmp_path):
    class Keeps(Callback):
        def state_dict(self):
            return {"mean": np.zeros(3)}

    with pytest.raises(TypeError, match="ndarray is not JSON serializable"):
        train(quick, tmp_path, callbacks=[Keeps()])


def test_callback_used_outside_a_run_or_given_as_a_class_is_refused(quick, tmp_path):
    with pytest.raises(SettingsError, match="log: call it in a method of a callback while"):
        Empty().log("x", 1.0)
    with pytest.raises(SettingsError, match="is not an object of a subclass"):
        train(quick, tmp_path, callbacks=[Empty])


def test_error_for_a_sink_with_the_old_name_of_a_method_gives_the_new_name():
    with pytest.raises(TypeError, match=r"^Old\.metrics has a new name: on_summary$"):
        type("Old", (Sink,), {"metrics": lambda *_: None})


def test_settings_are_told_once_before_the_first_exchange_and_never_by_a_finished_run(
    quick, tmp_path
):
    class Told(Callback):
        def __init__(self):
            self.told = []

        def on_settings(self, settings):
            self.told.append(settings.behaviors["Toy"].max_steps)

        def on_exchange(self, steps, n_episodes):
            self.told[1:] = ["exchanged"]

    first, again = Told(), Told()
    train(quick, tmp_path, callbacks=[first], changes={"max_steps": 60})
    assert first.told == [60, "exchanged"]
    train(quick, tmp_path, callbacks=[again], changes={"max_steps": 60}, resume=True)
    assert again.told == []


def test_error_in_on_settings_ends_the_run_before_it_starts(quick, tmp_path):
    class Refuses(Callback):
        def on_settings(self, settings):
            raise OSError("disk full")

    train(quick, tmp_path / "run", changes={"max_steps": 60})
    kept = files_of(tmp_path / "run")
    with pytest.raises(TrainingError, match="disk full"):
        train(quick, tmp_path / "run", callbacks=[Refuses()], force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert files_of(tmp_path / "run") == kept
