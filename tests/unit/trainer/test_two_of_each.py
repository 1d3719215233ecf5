"""Two behaviors, workers, teams or moments: what belongs to each, and what comes first."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from pairs import Pair
from steps import decision_steps, take_turn, terminal_steps
from test_restarted_worker import FailsAt, Long
from test_restored_learner import PLAIN, SPEC, learner_of, messages
from test_sync import Pair as TwoProcesses
from test_trainer_composition import alternate, player
from toys import Corridor

from pipeline.envs.in_process import InProcessEnvironment
from pipeline.envs.workers import WorkerSet
from pipeline.nets.encoder import Normalizers
from pipeline.tracking import names
from pipeline.trainer import loop as loop_module
from pipeline.trainer.checkpoints import manager as manager_module
from pipeline.trainer.checkpoints import replay_files
from pipeline.trainer.checkpoints.file import digest, from_saved, to_saved
from pipeline.trainer.checkpoints.manager import CheckpointManager
from pipeline.trainer.checkpoints.resume_points import JointResumePoints
from pipeline.trainer.curriculum import Curriculum
from pipeline.trainer.distributed.group import DistributedGroup
from pipeline.trainer.distributed.sync import LearnerSync
from pipeline.trainer.learner import Learner
from pipeline.trainer.self_play import SelfPlay
from pipeline.trainer.statistics import Statistics
from pipeline.trainer.timing import Stopwatch


def test_a_restart_of_a_worker_drops_what_every_behavior_has_of_it_and_nothing_else(
    quick, make_loop
):
    def both(seed):
        return Pair(Long(seed=seed, n_agents=1), Long(seed=seed + 1, n_agents=2))

    envs = [InProcessEnvironment(both(1)), FailsAt(both(3), at=6)]
    new = InProcessEnvironment(both(8))
    with WorkerSet(envs, relaunch=lambda *_: new) as workers:
        loop = make_loop(workers, quick("One", "Two"))
        loop._begin()
        steps = []
        for n in (9, 6):
            for _ in range(n):
                loop._step()
                loop._receive()
            steps.append({name: learner.step for name, learner in loop.learners.items()})
    # Eight rows of each agent of the first worker, then eight of each of the second since it fell.
    assert steps == [{"One": 8, "Two": 16}, {"One": 16, "Two": 32}]
    assert loop.resume_points.interrupted == [0]


def test_a_step_is_reported_and_measured_before_each_behavior_learns_and_sums_up(
    quick, make_loop, monkeypatch
):
    calls, left = [], {"One": 2, "Two": 0}

    def noted(text):
        return lambda *_: calls.append(text)

    def learn(name):
        left[name] -= 1
        return left[name] >= 0

    simulator = Pair(Corridor(n_agents=2), Corridor(n_agents=2))
    with WorkerSet([InProcessEnvironment(simulator)]) as workers:
        loop = make_loop(workers, quick("One", "Two"))
        loop._begin()
        loop._step()
        loop._receive()
        monkeypatch.setattr(loop_module, "add_reports", noted("reports"))
        monkeypatch.setattr(loop.synchronizer, "sync_if_due", noted("meeting"))
        monkeypatch.setattr(loop.lessons, "on_step", noted("lessons"))
        for name, learner in loop.learners.items():
            monkeypatch.setattr(learner, "learn", lambda name=name: learn(name))
        monkeypatch.setattr(loop, "_note_update", lambda x: calls.append(f"{x.name} update"))
        monkeypatch.setattr(loop, "_summarize", lambda x: calls.append(f"{x.name} summary"))
        loop._step()
    learned = ["One update", "One update", "One summary", "Two summary"]
    assert calls == ["reports", "meeting", "lessons", *learned]


def test_seconds_of_a_run_are_those_of_all_its_learners():
    stopwatch = Stopwatch(SimpleNamespace(codec_seconds=0.25))
    stopwatch.timed(lambda _: None, None)
    learners = [
        SimpleNamespace(name=name, seconds={"update": update, "storage": 1.0, **more})
        for name, update, more in (("One", 2.0, {"compile": 7.0}), ("Two", 5.0, {}))
    ]
    seconds = stopwatch.seconds(learners)
    assert [seconds[part] for part in ("update", "storage", "compile", "wire")] == [7, 2, 7, 0.25]


def test_what_the_other_processes_have_yet_to_hear_is_kept_apart(make_learner):
    learner = make_learner(Corridor.spec)
    learner.pending_stats = Statistics()
    learner.sync = SimpleNamespace(
        steps=0,
        should_update=lambda: learner.n_updates == 0,
        mean=lambda stats: {tag: value + 1.0 for tag, value in stats.items()},
    )
    obs = [np.zeros((2, 6))]
    take_turn(learner, [(decision_steps(obs), terminal_steps([np.zeros((0, 6))], []))])
    ends = terminal_steps(obs, [0, 1], reward=[1.0, 3.0])
    take_turn(learner, [(decision_steps([np.zeros((0, 6))], []), ends)])
    assert (learner.step, learner.sync.steps) == (0, 2)
    learner.algorithm.update = lambda *_, **__: {"Losses/Mean": 4.0}
    assert learner.learn()
    assert learner.statistics.period() == {"Losses/Mean": 5.0}, "which all processes have"
    pending = learner.pending_stats.period()
    assert pending[names.REWARD] == 2.0
    assert names.ENTROPY in pending
    assert "Losses/Mean" not in pending


def test_a_policy_is_shown_on_what_it_met_first_until_it_has_learned(make_learner):
    learner = make_learner(Corridor.spec)
    nobody = terminal_steps([np.zeros((0, 6))], [])
    for number in (1.0, 2.0, 3.0):
        take_turn(learner, [(decision_steps([np.full((2, 6), number)]), nobody)])
    assert learner.recorded["obs"][0].unique().tolist() == [1.0]


def test_beside_an_update_one_policy_acts_is_kept_and_normalises_as_at_its_beginning(make_learner):
    games = {"window": 50, "save_steps": 1, "play_against_latest_model_ratio": 0.0}
    learner = learner_of(make_learner, "ppo", PLAIN, threaded=True, self_play=games)
    normalizer = learner.algorithm.policy.normalizers.by_observation["0"]
    obs = [np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)]
    n_under_way, begun, kept = 0, {}, []
    for number, steps in enumerate(messages(40, seed=2, grouped=False)):
        take_turn(learner, steps)
        while learner.learn():
            pass
        if not learner.updates.is_under_way:
            continue
        acting = learner.acting.policy
        weights = learner.weights_dict()["algorithm"]["policy"]
        fresh = copy.deepcopy(acting)
        fresh.load_state_dict(weights)
        decided = [
            policy.act(obs, None, torch.Generator().manual_seed(1)).rows["log_prob"].tolist()
            for policy in (acting, fresh)
        ]
        assert decided[0] == decided[1], "with the statistics that it has"
        learner.past.save_due(10 * (number + 1))
        flat = [values.tolist() for values in weights.values()]
        assert flat == [values.tolist() for values in learner.past.snapshots[-1].values()]
        assert flat == [values.tolist() for values in acting.state_dict().values()]
        now = flat, float(normalizer.count)
        assert begun.setdefault(learner.n_updates, now) == now, "until the update is over"
        n_under_way += 1
        kept.append((weights, digest(weights)))
    assert all(digest(weights) == expected for weights, expected in kept), "as they were then"
    assert n_under_way > len(begun) > 2


class TwoAlike(TwoProcesses):
    """Two processes whose environments show the same."""

    def gathered(self, values):
        return [values, values.clone()]


def test_all_normalisers_of_a_behavior_are_those_of_the_rows_of_all_processes(make_learner):
    network = {"hidden_units": 8, "num_layers": 1, "normalize": True}
    own = {"network_settings": network}
    learner = make_learner(
        SPEC,
        network_settings=network,
        reward_signals={"extrinsic": {}, "curiosity": own, "rnd": own},
    )
    sync = LearnerSync(learner, TwoAlike(), seed=1)
    networks = [learner.algorithm.policy, *learner.algorithm.signals.modules.values()]
    found = [m for network in networks for m in network.modules() if isinstance(m, Normalizers)]
    assert len(found) == 3
    rng, expected = np.random.default_rng(1), Normalizers(SPEC.observation_specs, enabled=True)
    for shift in (2.0, -7.0, 4.0):
        obs = [rng.normal(shift, 1.0, (9, 3)).astype(np.float32)]
        learner.algorithm.observe(obs)
        rows = torch.from_numpy(obs[0])
        for normalizers in found:
            normalizers([rows])  # which may keep the scale as it is now
        sync.steps = 9
        sync.apply([sync.local_state()] * 2)
        expected.update([torch.cat((rows, rows))])
        for normalizers in found:
            torch.testing.assert_close(normalizers([rows]), expected([rows]))
            torch.testing.assert_close(normalizers.state_dict(), expected.state_dict())


@pytest.mark.parametrize("of", ["teams", "workers"])
def test_groups_of_two_with_the_same_number_have_no_members_in_common(make_learner, of):
    learner = learner_of(make_learner, "poca")
    nobody = terminal_steps([np.zeros((0, 3))], [])
    first, second = (
        (decision_steps([np.zeros((len(ids), 3))], ids, group_id=1), nobody)
        for ids in ([0, 1], [2, 3, 4])
    )
    if of == "teams":
        take_turn(learner, [first], team="Toy?team=0")
        take_turn(learner, [second], team="Toy?team=1")
    else:
        take_turn(learner, [first, second], team="Toy?team=0")
    groups = learner.grouping
    members = groups.moments.members(np.unique(groups.by_slot["moment"][:5]))
    assert members.present.sum(1).tolist() == [2, 3]


def test_a_moment_of_all_processes_is_written_once_when_all_have_it():
    calls, written = [], []
    keeper = SimpleNamespace(
        has_numbered=lambda _: False,
        snapshot=lambda *_, **__: calls.append("snapshot") or {"A": {}, "B": {}},
        write=lambda states, workers: written.append((states, workers)),
    )
    workers = SimpleNamespace(
        request_states=lambda: calls.append("request"), is_split=True, state_dict=lambda: ["ours"]
    )
    held = {"A": 1, "B": 2}
    learners = [SimpleNamespace(name=x, sync=SimpleNamespace(held=n)) for x, n in held.items()]
    points = JointResumePoints(keeper, workers, 0.0)
    points.is_exact = points.gives_states = True
    other = ({"A": {"held": 3}, "B": {"held": 4}}, ["theirs"])
    group = SimpleNamespace(gather_object=lambda part: [part, other])

    def meet(progress=None):
        note = points.note()
        points.meet([note, note | {"progress": progress or note["progress"]}], group)
        return points.is_due

    for number, (end, n_written) in enumerate(((None, 1), ("lost", 1), (None, 2)), 1):
        points.want()
        assert meet()
        points.begin(learners, {})
        assert calls == ["snapshot", "request"] * number, "states are those of the next message"
        assert not points.is_due
        assert not meet()
        points.complete()
        before = len(written)
        assert not meet("waits")
        assert len(written) == before
        assert not meet(end)
        for _ in range(2):
            assert not meet(), "asked for once"
        assert len(written) == n_written
    for states, environments in written:
        assert environments == ["ours"]
        assert {name: state["held"] for name, state in states.items()} == held
        assert {name: state["ranks"] for name, state in states.items()} == {
            name: [{"held": n, "environments": ["theirs"]}] for name, n in (("A", 3), ("B", 4))
        }


def test_a_resumed_run_deletes_later_checkpoints_of_each_behavior_with_their_policies(
    tmp_path, quick
):
    keeper = CheckpointManager(tmp_path, quick("A", "B"))
    for name in "AB":
        (tmp_path / name).mkdir()
        for step in (5, 20, 100):
            for suffix in ("pt", "onnx"):
                (tmp_path / name / f"{name}-{step}.{suffix}").touch()
        # Only A's checkpoint of this step was yet to come.
        keeper.restore(name, {"learner": {"step": 20}, "run": {"added": ["A"]}}, exact=True)
    kept = {path.name for path in tmp_path.glob("*/*-*")}
    assert kept == {f"{x}.{suffix}" for x in ("A-5", "B-5", "B-20") for suffix in ("pt", "onnx")}
    at = [SimpleNamespace(name=name, step=step) for name in "AB" for step in (5, 20)]
    assert [keeper.has_numbered(learner) for learner in at] == [True, False, False, True]


def test_replay_files_stay_until_no_checkpoint_of_any_behavior_needs_them(
    tmp_path, quick, monkeypatch
):
    def state(name, *files):
        replay = [[file, "digest", 1] for file in files]
        return {"behavior": name, "learner": {"step": 9}, "replay": replay}

    def killed(path, _state):
        if path.parent.name == "B":
            raise InterruptedError
        path.touch()

    older, newer = ("replay-4-1.npz", "replay-6-2.npz"), ("replay-6-2.npz", "replay-9-3.npz")
    for name in "AB":
        (tmp_path / name).mkdir()
        for file in {*older, *newer}:
            (tmp_path / name / file).touch()
    keeper = CheckpointManager(tmp_path, quick("A", "B"))
    states = {name: state(name, *newer) for name in "AB"}

    def left():
        return [{path.name for path in (tmp_path / name).glob("*.npz")} for name in "AB"]

    with monkeypatch.context() as patch:
        patch.setattr(manager_module, "save_checkpoint", killed)
        with pytest.raises(InterruptedError):
            keeper.write(states, workers=None)
    assert left() == [{*older, *newer}] * 2
    keeper.write(states, workers=None)
    assert left() == [set(newer)] * 2


def test_a_file_of_new_rows_never_has_the_name_of_one_that_is_still_needed(tmp_path, monkeypatch):
    monkeypatch.setattr(replay_files, "_write", lambda *_: None)
    made = []
    for names_kept in ([], ["replay-8.npz"], ["replay-8-4.npz", "replay-8-5.npz"]):
        replay = SimpleNamespace(
            kept=[(name, "digest", 1) for name in names_kept],
            new_rows=lambda: {"place": np.zeros(2)},
            note_kept=lambda name, *_: made.append(name),
        )
        replay_files.save_new_rows(tmp_path, SimpleNamespace(replay_to_keep=replay, step=8))
    assert made == ["replay-8-1.npz", "replay-8-1.npz", "replay-8-6.npz"]


def test_a_behavior_s_device_is_chosen_for_the_agents_of_all_workers(quick, make_loop, monkeypatch):
    asked = {}

    def chosen(name, *_, n_agents, kept):
        asked[name] = n_agents, kept
        return torch.device("cpu")

    monkeypatch.setattr(loop_module, "fastest_device", chosen)
    envs = [Pair(Corridor(n_agents=a), Corridor(n_agents=b)) for a, b in ((1, 4), (2, 5))]
    with WorkerSet([InProcessEnvironment(env) for env in envs]) as workers:
        loop = make_loop(workers, quick("One", "Two"))
        loop.device = None
        loop._begin()
        loop._saved = {"Two": {"run": {"devices": {"One": "no", "Two": "cuda:7"}}}}
        monkeypatch.setattr(loop_module, "restore", lambda *_, **__: None)
        monkeypatch.setattr(loop.keeper, "restore", lambda *_, **__: None)
        loop._step()
        assert asked == {"One": (3, None), "Two": (9, "cuda:7")}
        assert loop._shared_state()["devices"] == {"One": "cpu", "Two": "cpu"}


def test_decisions_of_a_ghost_are_counted_over_all_workers_and_by_its_own_behavior():
    self_play, pick, aim = SelfPlay(), player("Pick", swap_steps=5), player("Aim", swap_steps=5)
    alternate(self_play, pick, aim)
    assert [list(x.past.opponents) for x in (pick, aim)] == [[], ["Aim?team=1"]]
    ends = terminal_steps([], [9], reward=1.0)
    steps = [(decision_steps([], [0, 1]), ends), (decision_steps([], [0, 1, 2]), ends)]
    self_play.on_step("Aim?team=1", aim, steps)
    assert (pick.past.ghost_steps, aim.past.ghost_steps) == (0, 5)
    assert (pick.past.rating, aim.past.rating) == (1200.0, 1200.0), "a ghost's games do not count"
    self_play.on_step("Pick?team=0", pick, steps)
    assert (pick.past.ghost_steps, aim.past.ghost_steps) == (0, 5)
    assert pick.past.rating > 1200.0 > aim.past.ratings[0]
    assert not self_play.advance()
    assert aim.past.last_swap == 0
    aim.past.ghost_steps += 1
    assert not self_play.advance()
    assert aim.past.last_swap == 6


def test_a_behavior_is_measured_over_as_many_episodes_as_its_own_lessons_ask_for(quick):
    def lessons(behavior, length):
        criteria = {"measure": "reward", "behavior": behavior, "threshold": 2.0}
        criteria |= {"min_lesson_length": length, "signal_smoothing": False}
        first = {"name": "first", "value": 1.0, "completion_criteria": criteria}
        return {"curriculum": [first, {"name": "second", "value": 2.0}]}

    settings = quick("One", "Two", parameters={"p": lessons("One", 1), "q": lessons("Two", 3)})
    curriculum, begun = Curriculum(settings.environment_parameters), []
    for one, two in ((0.0, 9.0), (0.0, 9.0), (3.0, None), (None, 9.0)):
        for name, value in (("One", one), ("Two", two)):
            returns = [] if value is None else [value]
            curriculum.observe(name, returns=returns, step=0, max_steps=1)
        begun.append(curriculum.advance().parameters)
    # One's last return is above 2; then all begin anew, and Two has one episode of three.
    assert begun == [(), (), ("p",), ()]


def test_who_only_acts_or_has_finished_observes_nothing(make_learner, quick):
    settings = quick(network_settings=PLAIN).behaviors["Toy"]
    device = torch.device("cpu")
    learners = [Learner("Toy", SPEC, settings, seed=1, device=device, learns=x) for x in (1, 0)]
    learners.append(Learner("Toy", SPEC, settings, seed=1, device=device))
    learners[2].step = settings.max_steps
    counts = []
    for learner in learners:
        for steps in messages(12, seed=1, grouped=False):
            take_turn(learner, steps)
        counts.append(float(learner.algorithm.policy.normalizers.by_observation["0"].count))
    assert counts[0] > 1.0
    assert counts[1:] == [1.0, 1.0]
    assert learners[1].step > 0


def test_a_process_weighs_as_much_as_others_again_after_its_minibatches():
    group = object.__new__(DistributedGroup)
    group.rank, group.size, group._weight = 0, 2, 1.0
    group._numbers = lambda _: np.array([[1, 3], [1, 1]])
    assert [group._weight for _ in group.weighted([1, 3])] == [1.0, 1.5]
    assert group._weight == 1.0


def test_what_is_taken_up_from_a_file_may_be_written_to_and_the_file_s_state_stays():
    saved = to_saved({"rows": [np.arange(3.0)]})
    taken = from_saved(saved)
    taken["rows"][0][:] = 9.0
    assert saved["rows"][0].tolist() == [0.0, 1.0, 2.0]


def test_a_numbered_checkpoint_is_whole_before_it_is_told_of_and_before_older_ones_go(
    tmp_path, quick, make_learner, monkeypatch
):
    learner, seen = make_learner(Corridor.spec, keep_checkpoints=1), []

    def export(path, folder, *, label):
        assert path.exists()
        (folder / f"{folder.name}{label}.onnx").touch()

    def told(name, path, step):
        steps = [entry["steps"] for entry in keeper.status.read()[name]["checkpoints"]]
        seen.append((path.with_suffix(".onnx").exists(), step, steps))

    keeper = CheckpointManager(tmp_path, quick(), exporter=export, on_checkpoint=told)
    learner.step = 10
    keeper.milestone(learner, {})
    learner.step = 20
    with monkeypatch.context() as patch:
        patch.setattr(manager_module, "save_checkpoint", None)
        with pytest.raises(TypeError):
            keeper.milestone(learner, {})
    assert (tmp_path / "Toy/Toy-10.pt").exists()
    assert not keeper.has_numbered(learner)
    keeper.milestone(learner, {})
    assert [path.name for path in tmp_path.glob("Toy/*.pt")] == ["Toy-20.pt"]
    assert seen == [(True, 10, [10]), (True, 20, [20])]
