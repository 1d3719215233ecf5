from __future__ import annotations

import numpy as np
import pytest
from steps import decision_steps

from pipeline.core.specs import ActionSpec, ActionTuple, BehaviorSpec, ObservationSpec
from pipeline.core.steps import DecisionSteps, TerminalSteps
from pipeline.envs.in_process import InProcessEnvironment
from pipeline.envs.workers import WorkerSet
from pipeline.errors import (
    UnityActionException,
    UnityEnvironmentException,
    UnityObservationException,
)

SPEC = BehaviorSpec([ObservationSpec.vector(1)], ActionSpec(1, ()))


class Counter:
    """Behavior A observes the sum of its actions; behavior B appears in the second step."""

    def __init__(self) -> None:
        self.behavior_specs = {"A": SPEC, "B": SPEC}
        self.seen: list[dict[str, ActionTuple]] = []
        self.parameters: dict[str, float] = {}
        self.closed = False

    def reset(self):
        self.total = 0.0
        return {"A": self._ask(self.total), "B": self._nobody()}

    def step(self, actions):
        self.seen.append(dict(actions))
        self.total += float(actions["A"].continuous.sum())
        return {"A": self._ask(self.total)} | ({"B": self._ask(0)} if len(self.seen) == 2 else {})

    def set_parameter(self, name, value):
        self.parameters[name] = value

    def close(self):
        self.closed = True

    def _ask(self, value: float):
        return decision_steps([[[value]]]), TerminalSteps.empty(SPEC)

    def _nobody(self):
        return DecisionSteps.empty(SPEC), TerminalSteps.empty(SPEC)


def test_in_process_environment_has_the_semantics_of_unity_environment():
    counter = Counter()
    env = InProcessEnvironment(counter)
    assert dict(env.behavior_specs) == {}
    env.step()  # the first step is a reset
    assert counter.seen == []
    assert list(env.behavior_specs) == ["A"]
    env.set_actions("A", ActionTuple(np.full((1, 1), 2.0)))
    env.step()
    assert env.get_steps("A")[0].obs[0].item() == 2
    env.step()
    assert counter.seen[1]["A"].continuous.tolist() == [[0]]
    assert list(env.behavior_specs) == ["A", "B"]
    env.step()
    assert len(env.get_steps("B")[0]) == 0
    env.set_actions("A", ActionTuple(np.ones((1, 1))))
    env.reset()
    env.step()
    assert env.get_steps("A")[0].obs[0].item() == 0, "a reset forgets actions"
    env.set_parameter("gravity", 3.0)
    assert counter.parameters == {"gravity": 3.0}
    env.close()
    assert counter.closed
    with pytest.raises(UnityEnvironmentException, match="No Unity environment is loaded"):
        env.reset()


def test_steps_of_a_behavior_have_no_agents_for_a_worker_that_lacks_the_behavior():
    first, second = InProcessEnvironment(Counter()), InProcessEnvironment(Counter())
    second.reset()
    second.step()
    with WorkerSet([first, second]) as workers:
        first.reset()
        second.step()
        assert list(workers.behavior_specs) == ["A", "B"]
        assert [len(decision) for decision, _ in workers.get_steps("B")] == [0, 1]
        nothing = SPEC.action_spec.empty_action(0)
        workers.set_actions("B", [nothing, ActionTuple(np.ones((1, 1)))])
        with pytest.raises(UnityActionException, match="'A', 'B'"):
            workers.get_steps("C")
        with pytest.raises(ValueError, match="shorter"):
            workers.set_actions("B", [nothing])


def test_behavior_that_a_worker_announces_with_another_specification_is_refused():
    discrete = BehaviorSpec(SPEC.observation_specs, ActionSpec(0, (2,)))
    counters = Counter(), Counter()
    counters[1].behavior_specs = {"A": SPEC, "B": discrete}
    with WorkerSet([InProcessEnvironment(counter) for counter in counters]) as workers:
        workers.reset()
        workers.step()
        assert list(workers.behavior_specs) == ["A"]
        workers.step()
        with pytest.raises(UnityObservationException, match=r"^behavior B: worker 1 takes the"):
            _ = workers.behavior_specs


def test_all_workers_are_closed_when_closing_one_fails():
    counters = [Counter(), Counter(), Counter()]
    envs = [InProcessEnvironment(counter) for counter in counters]
    envs[1].close()
    with (
        pytest.raises(UnityEnvironmentException, match="No Unity environment is loaded"),
        WorkerSet(envs),
    ):
        pass
    assert all(counter.closed for counter in counters)
