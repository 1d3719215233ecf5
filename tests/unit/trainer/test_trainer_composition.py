"""Which worker, behavior, file or moment an action is about, and what the second of two does."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from pairs import Pair
from steps import decision_steps, take_turn, terminal_steps
from test_restarted_worker import NAME, FailsAt, Long
from toys import Corridor

from pipeline import seeding
from pipeline.data.columns import Columns, Field
from pipeline.envs.in_process import InProcessEnvironment
from pipeline.envs.side_channels import StatsAggregationMethod
from pipeline.envs.workers import WorkerSet
from pipeline.settings.schema.trainer import SelfPlaySettings
from pipeline.tracking import names
from pipeline.trainer import environment
from pipeline.trainer.checkpoints import manager as manager_module
from pipeline.trainer.checkpoints.file import load_checkpoint, of_each_rank
from pipeline.trainer.checkpoints.manager import CheckpointManager
from pipeline.trainer.checkpoints.restore import latest_run
from pipeline.trainer.checkpoints.resume_points import JointResumePoints
from pipeline.trainer.curriculum import Lessons
from pipeline.trainer.grouping import GroupTracker
from pipeline.trainer.opponents import Opponent, SnapshotPool, expected_score
from pipeline.trainer.result import result_of
from pipeline.trainer.self_play import SelfPlay
from pipeline.trainer.statistics import EXTRINSIC, Statistics
from pipeline.trainer.stopping import StopRequest
from pipeline.trainer.timing import Progress, add_reports
from pipeline.trainer.updates import Overlap


def test_a_restart_of_one_worker_keeps_the_open_trajectories_of_the_other(quick, make_loop):
    envs = [
        InProcessEnvironment(Long(seed=1, n_agents=2)),
        FailsAt(Long(seed=2, n_agents=3), at=6),
    ]
    new = InProcessEnvironment(Long(seed=9, n_agents=3))
    with WorkerSet(envs, relaunch=lambda *_: new) as workers:
        loop = make_loop(workers, quick())
        loop._begin()
        for _ in range(9):
            loop._step()
            loop._receive()
        # two agents of the first worker have closed eight rows each; of the second nobody has
        assert loop.learners["Toy"].step == 2 * 8
        assert loop.resume_points.interrupted == [0]
        for _ in range(6):
            loop._step()
            loop._receive()
        assert loop.learners["Toy"].step == 2 * 8 + 3 * 8
    assert NAME in loop._learner_of


def player(name, **settings):
    """A stand-in for a learner with self-play, and with a policy of one weight."""
    self_play = SelfPlaySettings(play_against_latest_model_ratio=0.0, **settings)
    policy = torch.nn.Linear(1, 1, bias=False)
    return SimpleNamespace(
        name=name,
        policy=policy,
        past=SnapshotPool(lambda: policy, self_play, seed=1, device=torch.device("cpu")),
        step=0,
        learns=True,
        finished=False,
        settings=SimpleNamespace(self_play=self_play, max_steps=10**6),
    )


def weight(module):
    return float(module.weight if hasattr(module, "weight") else module["weight"])


def test_a_snapshot_that_is_due_is_taken_before_opponents_are_drawn():
    self_play, learner = SelfPlay(), player("A", window=1, save_steps=10, team_change=10)
    for team in (0, 1):
        self_play.join(f"A?team={team}", learner)
    learner.policy.weight.data.fill_(5.0)
    learner.step = 11
    assert self_play.advance()
    assert weight(learner.past.opponents["A?team=0"].policy) == 5.0


class Workers:
    """Notes the calls of a worker set in their order."""

    def __init__(self) -> None:
        self.calls: list[object] = []

    def reset(self):
        self.calls.append("reset")

    def set_parameter(self, name, value):
        self.calls.append((name, value))
        return True


LESSONS = {
    "pay": {
        "curriculum": [
            {
                "name": "first",
                "value": 1.0,
                "completion_criteria": {
                    "measure": "progress",
                    "behavior": "Toy",
                    "threshold": 0.5,
                    "require_reset": True,
                },
            },
            {"name": "second", "value": 2.0},
        ]
    },
    "wind": 3.0,
}


def lessons(settings, workers):
    return Lessons(workers, settings.environment_parameters)


@pytest.mark.parametrize("exact", [True, False])
def test_a_lesson_that_began_before_a_kill_is_told_after_it(exact, quick, make_learner):
    settings = quick(parameters=LESSONS)
    learner = make_learner(Corridor.spec)
    before = lessons(settings, Workers())
    learner.step = 400
    before.on_step([learner])  # killed before `apply` could tell the environments
    workers = Workers()
    after = lessons(settings, workers)
    after.restore({"lessons": before.state_dict()}, exact=exact)
    if not exact:
        after.begin()
    after.apply([learner])
    assert workers.calls == [("pay", 2.0), ("wind", 3.0), "reset"]
    assert not after.apply([learner])


class KilledError(Exception):
    """Stands for a kill."""


def test_a_second_kill_between_two_files_leaves_a_common_moment_too(tmp_path, quick, monkeypatch):
    settings = quick("A", "B")
    save, left = manager_module.save_checkpoint, []

    def killed(path, state):
        if not left or left.pop():
            save(path, state)
            return
        raise KilledError

    monkeypatch.setattr(manager_module, "save_checkpoint", killed)

    def moment(number):
        run = {"steps": {"A": number, "B": number}}
        return {
            name: {"behavior": name, "run": run, "learner": {"step": number}} for name in ("A", "B")
        }

    def saved():
        manager = CheckpointManager(tmp_path, settings)
        states = manager.saved()
        assert states["A"]["run"] == states["B"]["run"], "of one moment"
        return manager, states["A"]["run"]["steps"]["A"]

    CheckpointManager(tmp_path, settings).write(moment(1), workers=None)
    for number in (2, 3, 4):  # each run goes on from moment 1, and is killed after one file
        manager, resumed_at = saved()
        assert resumed_at == 1
        left[:] = [False, True]
        with pytest.raises(KilledError):
            manager.write(moment(number), workers=None)
    manager, resumed_at = saved()
    assert resumed_at == 1
    manager.write(moment(5), workers=None)
    assert saved()[1] == 5
    # A moment that was written whole is the one to keep from then on.
    left[:] = [False, True]
    with pytest.raises(KilledError):
        manager.write(moment(6), workers=None)
    assert saved()[1] == 5


def alternate(self_play, *learners):
    """Let each learner's behavior play for a team of its own, in this order."""
    for team, learner in enumerate(learners):
        self_play.join(f"{learner.name}?team={team}", learner)


def end_game(self_play, qualified, learner, reward, worker=0, n_workers=1):
    nobody = decision_steps([], []), terminal_steps([], [])
    steps = [nobody] * n_workers
    steps[worker] = nobody[0], terminal_steps([], [0], reward=reward)
    self_play.on_step(qualified, learner, steps)


def test_a_team_learns_for_its_own_steps_since_its_own_turn_began():
    self_play, pick, aim = SelfPlay(), player("Pick", team_change=10), player("Aim", team_change=10)
    alternate(self_play, pick, aim)
    turns = []
    for pick_step, aim_step in ((11, 0), (11, 10), (11, 11), (11, 11), (21, 11), (22, 11)):
        pick.step, aim.step = pick_step, aim_step
        turns.append((self_play.advance(), self_play.learning))
    assert turns == [(True, 1), (False, 1), (True, 0), (False, 0), (False, 0), (True, 1)]
    # one of two behaviors of a team is enough
    self_play, mate = SelfPlay(), player("Mate", team_change=10)
    pick.step = mate.step = 0
    for qualified, learner in (("Pick?team=0", pick), ("Mate?team=0", mate), ("Pick?team=1", pick)):
        self_play.join(qualified, learner)
    mate.step = 11
    assert self_play.advance()


def test_a_game_moves_the_rating_of_the_snapshot_that_played_it():
    self_play, pick, aim = SelfPlay(), player("Pick", window=2), player("Aim", window=2)
    alternate(self_play, pick, aim)
    aim.past.save_due(10**6)
    aim.past.opponents["Aim?team=1"].play(aim.past.snapshots[1], 1)
    pick.past.ratings[:] = [1000.0, 1100.0, 1300.0]
    aim.past.ratings[:] = [1400.0, 1500.0, 1600.0]
    end_game(self_play, "Pick?team=0", pick, 1.0)
    gain = 1 - expected_score(1300.0, 1500.0)
    assert pick.past.ratings == [1000.0, 1100.0, pytest.approx(1300.0 + gain)]
    assert aim.past.ratings == [1400.0, pytest.approx(1500.0 - gain), 1600.0]


def test_opponents_of_a_behavior_are_drawn_by_its_own_clock():
    self_play, one, two = SelfPlay(), player("One", swap_steps=5), player("Two", swap_steps=5)
    for team in (0, 1):
        for learner in (one, two):
            self_play.join(f"{learner.name}?team={team}", learner)
    for steps, swapped in (((5, 6), (0, 6)), ((6, 11), (6, 6))):
        one.past.ghost_steps, two.past.ghost_steps = steps
        assert not self_play.advance()
        assert (one.past.last_swap, two.past.last_swap) == swapped


def test_games_of_each_worker_end_with_their_own_mates():
    self_play, learner = SelfPlay(), player("A")
    for team in (0, 1):
        self_play.join(f"A?team={team}", learner)
    nobody = terminal_steps([], [])
    left, right = (decision_steps([], ids, group_id=ids[0]) for ids in ([1, 2], [3, 4]))
    self_play.on_step("A?team=0", learner, [(left, nobody), (right, nobody)])
    rating = learner.past.rating
    one = terminal_steps([], [3], group_id=3, reward=1.0)
    still = decision_steps([], [4], group_id=3)
    self_play.on_step("A?team=0", learner, [(left, nobody), (still, one)])
    assert learner.past.rating == rating, "a mate of the second worker plays on"
    both = terminal_steps([], [1, 2], group_id=1, reward=1.0)
    self_play.on_step("A?team=0", learner, [(left, both), (still, nobody)])
    assert learner.past.rating > rating


def test_opponents_draw_from_streams_of_their_own_and_remember_the_policys_part():
    class Acts(torch.nn.Module):
        memory_size = 2

        def act(self, _obs, _mask, stream, memory):
            return torch.rand(3, generator=stream).tolist(), memory

    device = torch.device("cpu")
    memory = np.arange(6.0).reshape(2, 3)
    first, second = (
        Opponent(Acts(), seed=1, device=device, team=team).act([], None, memory) for team in "ab"
    )
    assert first[0] != second[0]
    assert first[1].tolist() == [[0.0, 1.0], [3.0, 4.0]]


@pytest.fixture
def pair(quick, make_loop, recorder):
    """A loop of two behaviors after its first step, each with twenty episodes of its own."""
    simulator = Pair(Corridor(n_agents=2), Corridor(n_agents=2))
    with WorkerSet([InProcessEnvironment(simulator)]) as workers:
        parameters = {"pay": 1.0}
        loop = make_loop(workers, quick("One", "Two", parameters=parameters), sinks=[recorder])
        loop._begin()
        loop._step()
        for name, value, step in (("One", 1.0, 145), ("Two", 7.0, 370)):
            learner = loop.learners[name]
            learner.statistics = Statistics()
            learner.statistics.add_episodes([value, value + 2.0] * 10, [4] * 20)
            learner.statistics.add("Mark", value)
            learner.seconds["mark"] = value
            learner.step = step
        yield loop


def test_a_summary_and_the_best_are_of_their_own_behavior_and_period(pair, recorder, tmp_path):
    for learner in pair.learners.values():
        pair._summarize(learner)
    rows = {behavior: (step, values) for behavior, step, values in recorder.rows}
    assert {name: step for name, (step, _) in rows.items()} == {"One": 100, "Two": 300}
    tags = (names.REWARD, names.REWARD_STD, "Time/mark", "Mark", names.LESSON_NUMBER + "pay")
    assert [[values[tag] for tag in tags] for _, values in rows.values()] == [
        [2.0, 1.0, 1.0, 1.0, 0.0],
        [8.0, 1.0, 7.0, 7.0, 0.0],
    ]
    assert recorder.spreads[names.REWARD] == [[1.0, 3.0] * 10, [7.0, 9.0] * 10]
    best = {"One": {"reward": 2.0, "step": 145}, "Two": {"reward": 8.0, "step": 370}}
    assert pair.keeper.best == best
    pair.learners["Two"].seconds["mark"] = 10.0
    pair.learners["Two"].step = 401
    pair._summarize(pair.learners["Two"])
    assert recorder.rows[-1][2]["Time/mark"] == 3.0, "since its own last summary"
    pair.keeper.refresh(list(pair.learners.values()), {})
    for name, kept in best.items():
        states = [load_checkpoint(tmp_path / name / file) for file in ("checkpoint.pt", "best.pt")]
        assert [state["best"] for state in states] == [kept, kept]
    # a new lesson keeps the file of the best so far, and begins to compare anew
    learner = pair.learners["One"]
    learner.statistics.recent.extend([50.0] * 100)
    pair.keeper.consider(learner)
    pair.lessons.apply = lambda _: True
    pair._apply_lessons()
    assert pair.keeper.best == {}
    assert load_checkpoint(tmp_path / "One/best.pt")["best"]["reward"] == 50.0


def test_checkpoints_follow_the_updates_and_the_interval_of_their_own_behavior(pair, tmp_path):
    one, two = pair.learners["One"], pair.learners["Two"]
    two.settings = replace(two.settings, checkpoint_interval=50)
    pair._updated = {"One"}  # at 145 steps, of 200; the other one, at 370, has had no update
    pair._save_due()
    assert not list(tmp_path.glob("*/*-*.pt"))
    one.step = 250
    pair._updated = {"One", "Two"}
    pair._save_due()
    assert [path.name for path in sorted(tmp_path.glob("*/*-*.pt"))] == ["One-250.pt", "Two-370.pt"]
    run = load_checkpoint(tmp_path / "Two/Two-370.pt")["run"]
    assert run["next_checkpoint"] == {"One": 400, "Two": 400}
    assert run["steps"] == {"One": 250, "Two": 370}
    assert pair.resume_points.is_due
    assert not pair._updated, "until the next update"
    # a resumed behavior has what its own file says is due, though another one's would be sooner
    run = {"next_checkpoint": {"One": 200, "Two": 350}}
    assert [Progress.of(learner, run).next_checkpoint for learner in (one, two)] == [200, 350]


def test_a_moment_is_written_before_a_lesson_changes_the_environments(make_loop, quick):
    calls = []
    with WorkerSet([InProcessEnvironment(Corridor())]) as workers:
        loop = make_loop(workers, quick())
        note = {name: lambda *_, name=name: calls.append(name) for name in ("complete", "begin")}
        flags = dict.fromkeys(("is_exact", "is_pending", "is_due"), True)
        loop.resume_points = SimpleNamespace(**flags, **note, state_dict=dict)
        for name in ("_step", "_receive", "_apply_lessons"):
            setattr(loop, name, lambda *_, name=name: calls.append(name))
        loop._finished = lambda: calls.count("_step") > 1
        loop._note_start = lambda: None
        loop._step_until_finished(StopRequest())
    assert calls == ["_step", "_receive", "complete", "_apply_lessons", "begin", "_step"]


def test_a_lesson_is_measured_by_the_behavior_that_it_names(quick, make_learner):
    def criteria(**values):
        return [
            {"name": "a", "value": 1.0, "completion_criteria": values},
            {"name": "b", "value": 2.0},
        ]

    settings = quick(
        limits={"One": 100, "Two": 1000},
        self_play={"window": 1},
        parameters={
            name: {"curriculum": criteria(behavior=behavior, measure=measure, threshold=threshold)}
            for name, behavior, measure, threshold in (
                ("p1", "One", "progress", 0.5),
                ("p2", "Two", "progress", 0.5),
                ("r1", "One", "reward", 3.0),
                ("e2", "Two", "elo", 1300.0),
            )
        },
    )
    told = lessons(settings, Workers())
    one, two = player("One", window=1), player("Two", window=1)
    for learner, max_steps in ((one, 100), (two, 1000)):
        learner.settings.max_steps = max_steps
        learner.statistics = Statistics()
    one.past.ratings[:], two.past.ratings[:] = [1500.0, 1200.0], [1400.0, 1200.0]

    def begun():
        told.on_step([one, two])
        told.apply([])
        return sorted(name for name, number in told.curriculum.numbers.items() if number)

    two.statistics.add_episodes([9.0], [1])
    one.step = two.step = 50
    assert begun() == []
    one.step = two.step = 51
    assert begun() == ["p1"]
    one.statistics.add_episodes([9.0], [1])
    assert begun() == ["p1", "r1"]
    two.past.ratings[-1] = 1301.0
    assert begun() == ["e2", "p1", "r1"]


def test_a_resumed_run_goes_by_its_newest_file_and_says_where_it_was_interrupted(
    quick, make_loop, tmp_path
):
    runs = [{"steps": {"A": 10, "B": 30}}, {"steps": {"A": 20, "B": 30}}]
    states = {"A": {"run": runs[1]}, "B": {"run": runs[0]}}
    assert latest_run(states) == latest_run(dict(reversed(states.items()))) == runs[1]
    with WorkerSet([InProcessEnvironment(Corridor())]) as workers:
        points = make_loop(workers, quick()).resume_points
        points.resumed({"steps": {"A": 20, "B": 30}, "interrupted": [5]}, is_exact=False)
        workers.reset()
        points.note_start([SimpleNamespace(finished=False, algorithm=SimpleNamespace(replay=None))])
    assert points.interrupted == [5, 30]
    learner = SimpleNamespace(step=3, n_updates=1, statistics=Statistics(), past=None)
    result = result_of({"A": learner}, tmp_path, {}, interrupted=[5, 30], n_exchanges=0)
    assert result.behaviors["A"].interrupted_at == 30


def test_each_process_goes_on_from_its_own_part_and_replays_are_deleted_in_each_folder(
    tmp_path, quick
):
    def part(number):
        return {"learner": {"algorithm": {"stream": number}}, "experience": number}

    first = {**part(0), "learner": {"algorithm": {"stream": 0, "policy": "shared"}}}
    saved = of_each_rank({"A": {**first, "ranks": [part(1), part(2)]}}, 3)
    assert [rank["A"]["experience"] for rank in saved] == [0, 1, 2]
    assert [rank["A"]["learner"]["algorithm"] for rank in saved] == [
        {"stream": number, "policy": "shared"} for number in range(3)
    ]
    for name in "AB":
        for file in ("replay-1-1.npz", "replay-2-1.npz"):
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / file).touch()
    states = {
        name: {
            "behavior": name,
            "learner": {"step": 8},
            "replay": [[f"replay-{kept}-1.npz", "digest", 1]],
        }
        for name, kept in (("A", 1), ("B", 2))
    }
    CheckpointManager(tmp_path, quick("A", "B")).write(states, workers=None)
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.glob("*/*.npz")) == [
        "A/replay-1-1.npz",
        "B/replay-2-1.npz",
    ]


def test_memories_are_those_of_each_workers_agents(make_learner, monkeypatch):
    network = {"hidden_units": 8, "num_layers": 1}
    network["memory"] = {"sequence_length": 4, "memory_size": 8}
    learner = make_learner(Corridor.spec, network_settings=network)

    def message(n, ended=()):
        obs = [np.zeros((n, 6))]
        return decision_steps(obs), terminal_steps([np.zeros((len(ended), 6))], ended)

    take_turn(learner, [message(2), message(3)])
    slots = [learner.slots.deciding(("", worker), np.arange(n)) for worker, n in ((0, 2), (1, 3))]
    learner.memories[np.concatenate(slots)] = np.arange(1.0, 6.0)[:, None]
    recalled, act = [], learner.algorithm.act

    def noted(obs, masks, memory):
        recalled.append(memory[:, 0].tolist())
        return act(obs, masks, memory)

    monkeypatch.setattr(learner.algorithm, "act", noted)
    learner.decide(learner.receive([message(2), message(3, [1])]))
    take_turn(learner, [message(0), message(3, [2])])
    assert learner.slots.n_slots == 5, "agents of the second worker stay its own"
    assert recalled == [[1.0, 2.0, 3.0, 0.0, 5.0], [3.0, 4.0, 0.0]]


def test_what_several_report_is_taken_once_and_in_its_order():
    ours, theirs = Statistics(), Statistics()
    for number, statistics in enumerate((ours, theirs)):
        latest = [(float(number), StatsAggregationMethod.MOST_RECENT)]
        statistics.add_environment({"Level": latest})
        statistics.add_episodes([10.0 + number], [3], own=[float(number)], learned=[100.0])
    both = Statistics()
    both.add_from([ours, theirs])
    assert list(both.recent) == both.take_ended() == [10.0, 11.0]
    assert both.returns == [0.0, 1.0]
    values = both.period()
    assert (values["Level"], values[names.REWARD], values[EXTRINSIC]) == (0.0, 0.5, 100.0)

    tracker = GroupTracker(Columns({}, [Field(shape=(1,))]))
    tracker.finished.append(3.0)
    for _ in range(2):
        tracker.report(None, np.zeros(0, np.intp), both)
    assert len(both.samples()[names.GROUP_REWARD][1]) == 1

    observed = []
    overlap = Overlap(SimpleNamespace(observe=observed.append))
    overlap.is_under_way, overlap._parts = True, (stats for stats in [1])
    for obs in ("first", "second"):
        overlap.observe(obs)
    assert observed == []
    overlap.take(at_once=True)
    assert observed == ["first", "second"]


class Starts(Corridor):
    """Notes its parameters at each reset."""

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.begun: list[dict[str, float]] = []

    def reset(self):
        self.begun.append(dict(self.parameters))
        return super().reset()


def test_a_resumed_run_begins_in_its_lessons_and_a_turn_tells_them_again(quick, make_loop):
    settings, toy = quick(parameters=LESSONS), Starts(n_agents=2)
    saved = lessons(settings, Workers())
    saved.curriculum.load_state_dict({"lessons": {"pay": 1, "wind": 0}})
    with WorkerSet([InProcessEnvironment(toy)]) as workers:
        loop = make_loop(workers, settings)
        run = {"lessons": saved.state_dict(), "steps": {"Gone": 70}}
        loop._saved = {"Gone": {"run": run, "learner": {"step": 70}}}
        loop._begin()
        for _ in range(3):
            loop._step()
            loop._receive()
        assert loop._shared_state()["steps"] == {"Gone": 70, "Toy": 0}
        learner = loop.learners["Toy"]
        assert learner.trajectories.n_held == 4
        loop.self_play = SimpleNamespace(learning=0, advance=lambda: True)
        toy.parameters.clear()
        loop._apply_lessons()
        assert learner.trajectories.n_held == 0
    assert toy.begun == [{"pay": 2.0, "wind": 3.0}] * 2


def test_a_finished_behavior_keeps_no_rows(make_learner):
    learner = make_learner(Corridor.spec, max_steps=100)
    env = InProcessEnvironment(Corridor(n_agents=8))
    env.reset()
    for _ in range(40):
        (name,) = env.behavior_specs
        env.set_actions(name, take_turn(learner, [env.get_steps(name)]).actions[0])
        env.step()
    assert learner.trajectories.n_closed >= 128
    assert not learner.learn()
    assert (learner.trajectories.n_closed, learner.n_updates) == (0, 0)


def test_reports_of_a_worker_are_of_the_behaviors_with_agents_there():
    empty, one = (decision_steps([], ids) for ids in ([], [0]))
    nobody = terminal_steps([], [])
    behaviors = [
        SimpleNamespace(name=name, pending_stats=Statistics()) for name in ("left", "right")
    ]
    sums = StatsAggregationMethod.SUM
    add_reports(
        [
            ("left?team=0", behaviors[0], [(one, nobody), (empty, nobody)]),
            ("right?team=0", behaviors[1], [(empty, nobody), (one, nobody)]),
        ],
        [{"of the first": [(1.0, sums)]}, {"of the second": [(2.0, sums)]}],
    )
    assert [behavior.pending_stats.period() for behavior in behaviors] == [
        {"of the first": 1.0},
        {"of the second": 2.0},
    ]


@pytest.mark.parametrize("first_wants", [True, False])
def test_the_first_process_alone_decides_when_a_moment_is_kept(first_wants, quick, tmp_path):
    keeper = CheckpointManager(tmp_path, quick())
    points = JointResumePoints(keeper, Workers(), 0.0)
    points.want()
    notes = [points.note() | {"gives states": True, "interrupted": steps} for steps in ([5], [3])]
    notes[0 if not first_wants else 1]["wanted"] = False
    points.meet(notes, None)
    assert points.is_due is first_wants
    assert points.interrupted == [3, 5]


def test_workers_of_all_processes_are_numbered_through(quick, tmp_path, monkeypatch):
    started = {}
    monkeypatch.setattr(
        environment, "launch_workers", lambda *args, **options: started.update(options, args=args)
    )
    job = environment.JobSpec(
        settings=quick(), seed=3, run_dir=tmp_path, env="game", num_envs=4, env_args=("--fast",)
    )
    environment.open_workers(job, SimpleNamespace(rank=2, size=3))
    assert started["args"] == ("game", 4)
    assert (started["first"], started["n_all"]) == (8, 12)
    assert started["seed"] == seeding.derive(3, "environment")
    assert started["additional_args"] == ("--fast",)
