"""ML-Agents' side of agreement.py; runs with the interpreter of `make peer`, not with ours.

    python peer_agreement.py CASE GIVEN FOUND

CASE is a file with the settings and the actions of a training, GIVEN one with weights, experience
and random numbers. ML-Agents' own trainer learns from it, and its weights go to the file FOUND.
"""

from __future__ import annotations

import json
import sys
import tempfile
from typing import TYPE_CHECKING, Any

import mlagents.torch_utils  # noqa: F401  # before torch, as in its trainers
import numpy as np
import torch
from mlagents.plugins.trainer_type import register_trainer_plugins
from mlagents.trainers.action_info import ActionInfo
from mlagents.trainers.agent_processor import AgentProcessor
from mlagents.trainers.behavior_id_utils import BehaviorIdentifiers, get_global_agent_id
from mlagents.trainers.buffer import AgentBuffer, BufferKey, RewardSignalUtil
from mlagents.trainers.poca.trainer import POCATrainer
from mlagents.trainers.ppo.trainer import PPOTrainer
from mlagents.trainers.sac.trainer import SACTrainer
from mlagents.trainers.settings import RunOptions
from mlagents.trainers.torch_entities.action_log_probs import LogProbsTuple
from mlagents.trainers.torch_entities.utils import ModelUtils
from mlagents_envs.base_env import (
    ActionSpec,
    ActionTuple,
    BehaviorSpec,
    DecisionSteps,
    DimensionProperty,
    ObservationSpec,
    ObservationType,
    TerminalSteps,
)

if TYPE_CHECKING:
    from mlagents.trainers.trajectory import Trajectory

BEHAVIOR = "B?team=0"
TRAINERS = {"ppo": PPOTrainer, "sac": SACTrainer, "poca": POCATrainer}
Data = dict[str, np.ndarray]


def main() -> None:
    """Train, and write the new weights."""
    case_path, input_path, output_path = sys.argv[1:]
    torch.set_num_threads(1)
    with open(case_path, encoding="utf-8") as file:  # noqa: PTH123  # nothing of ours is here
        case = json.load(file)
    with np.load(input_path) as content:
        data = {name: content[name] for name in content.files}
    trainer = make_trainer(case)
    networks = networks_of(trainer, case)
    for name, network in networks.items():
        for number, parameter in enumerate(learned(network)):
            values = torch.from_numpy(data[f"{name}/{number:03}"])
            parameter.data.copy_(values.view_as(parameter))
    draw_as_recorded(data)
    if case["clips_values"]:
        clip_values(trainer)
    if case["trainer"] == "poca":
        without_clipping_of_baselines()
        AgentBuffer.shuffle = lambda *_, **__: None  # all rows are one minibatch
        trainer.optimizer.critic.network_body._current_max_agents.data.fill_(3.0)
    if len(case["settings"]["reward_signals"]) == 1:
        trainer._update_reward_signals = lambda: None  # nothing learns, but rows are drawn
    if case["clones_means"]:
        clone_means(trainer)
    if case["trainer"] == "sac" and len(case["actions"]) > 1:
        average_branches(trainer, len(case["actions"]) - 1)
    Run(trainer, case, data).all()
    result = {
        f"{name}/{number:03}": parameter.detach().numpy()
        for name, network in networks.items()
        for number, parameter in enumerate(learned(network))
    }
    np.savez(output_path, **result)


def make_trainer(case: dict[str, Any]) -> Any:
    """A trainer with a policy, as the settings ask for it."""
    register_trainer_plugins()
    settings = RunOptions.from_dict({"behaviors": {"B": case["settings"]}}).behaviors["B"]
    obs_spec = ObservationSpec(
        (case["n_obs"],), (DimensionProperty.NONE,), ObservationType.DEFAULT, "seen"
    )
    n_continuous, *branches = case["actions"]
    spec = BehaviorSpec([obs_spec], ActionSpec(n_continuous, tuple(branches)))
    folder = tempfile.mkdtemp()
    trainer = TRAINERS[case["trainer"]]("B", 1, settings, True, False, 0, folder)
    behavior_id = BehaviorIdentifiers.from_name_behavior_id(BEHAVIOR)
    trainer.add_policy(behavior_id, trainer.create_policy(behavior_id, spec))
    return trainer


def networks_of(trainer: Any, case: dict[str, Any]) -> dict[str, torch.nn.Module]:
    """Return the trainer's networks, by their names in tables."""
    optimizer = trainer.optimizer
    networks: dict[str, Any] = {"policy": trainer.policy.actor}
    if case["trainer"] == "sac":
        temperatures = optimizer._log_ent_coef
        discrete = len(case["actions"]) > 1
        networks |= {"value": optimizer.critic, "target": optimizer.target_network}
        networks |= {"q1": optimizer.q_network.q1_network, "q2": optimizer.q_network.q2_network}
        used = temperatures.discrete if discrete else temperatures.continuous
        networks["temperature"] = torch.nn.ParameterList([used])
    elif optimizer.critic is trainer.policy.actor:
        shared = optimizer.critic
        networks["policy"] = torch.nn.ModuleList([shared.network_body, shared.action_model])
        networks["critic"] = shared.value_heads
    else:
        networks["critic"] = optimizer.critic
    for name, signal in optimizer.reward_signals.items():
        if name == "rnd":
            networks["rnd predictor"] = signal._training_network
            networks["rnd target"] = signal._random_network
        elif name == "curiosity":
            networks[name] = signal._network
        elif name == "gail":
            networks[name] = signal._discriminator_network
    return networks


def learned(network: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return a network's weights, without the numbers stored as parameters for Unity."""
    return [parameter for parameter in network.parameters() if parameter.requires_grad]


def draw_as_recorded(data: Data) -> None:
    """Replace ML-Agents' random draws by the recorded ones, in the same order."""
    used = dict.fromkeys(("shuffles", "integers", "normal", "uniform"), 0)

    def take(name: str, n: int) -> np.ndarray:
        first = used[name]
        used[name] += n
        if used[name] > len(data[name]):
            raise ValueError(f"more {name} are drawn here than there")
        return data[name][first : first + n]

    def randint(high: int, size: int) -> np.ndarray:
        drawn = take("integers", size)
        if drawn.max() >= high:
            raise ValueError(f"{drawn.max()} was drawn there of less than {high} here")
        return drawn

    def shuffle(buffer: AgentBuffer, sequence_length: int, key_list: Any = None) -> None:
        keys = key_list or list(buffer.keys())
        n = len(buffer[keys[0]]) // sequence_length
        order = take("shuffles", n).tolist()
        now = getattr(buffer, "order", None) or list(range(n))
        places = {row: place for place, row in enumerate(now)}
        for key in keys:
            rows = []
            for row in order:
                first = places[row] * sequence_length
                rows += buffer[key][first : first + sequence_length]
            buffer[key].set(rows)
        buffer.order = order

    def like(tensor: torch.Tensor, name: str) -> torch.Tensor:
        return torch.from_numpy(take(name, tensor.numel()).copy()).view(tensor.shape)

    np.random.randint = randint
    AgentBuffer.shuffle = shuffle
    torch.randn_like = lambda tensor: like(tensor, "normal")
    torch.rand = lambda shape: like(torch.empty(shape), "uniform")


def clip_values(trainer: Any) -> None:
    """Clip values as the paper has it, by epsilon standard deviations of the returns.

    In ML-Agents' buffer old values and returns are one column, so that its clipping has no effect.
    Here the old values get a column of their own.
    """
    names = list(trainer.optimizer.reward_signals)
    estimate, append = (
        trainer.optimizer.get_trajectory_value_estimates,
        trainer._append_to_update_buffer,
    )
    update, loss = trainer.optimizer.update, ModelUtils.trust_region_value_loss
    last: dict[str, Any] = {}

    def estimating(*args: Any) -> Any:
        last["estimates"], *rest = estimate(*args)
        return (last["estimates"], *rest)

    def appending(rows: AgentBuffer) -> None:
        for name in names:
            old = list(np.asarray(last["estimates"][name]).ravel())
            rows[RewardSignalUtil.baseline_estimates_key(name)].set(old)
        append(rows)

    def updating(batch: AgentBuffer, n: int) -> Any:
        last["old"] = {
            name: ModelUtils.list_to_tensor(batch[RewardSignalUtil.baseline_estimates_key(name)])
            for name in names
        }
        return update(batch, n)

    def clipped(values: Any, _: Any, returns: Any, epsilon: float, masks: Any) -> Any:
        losses = []
        for name in names:
            everything = trainer.update_buffer[RewardSignalUtil.returns_key(name)].get_batch()
            most = epsilon * float(np.std(np.asarray(everything, np.float32)))
            only = ({name: tensors[name]} for tensors in (values, last["old"], returns))
            losses.append(loss(*only, most, masks))
        return torch.stack(losses).mean()

    trainer.optimizer.get_trajectory_value_estimates = estimating
    trainer._append_to_update_buffer = appending
    trainer.optimizer.update = updating
    ModelUtils.trust_region_value_loss = staticmethod(clipped)


def without_clipping_of_baselines() -> None:
    """Switch clipping off: ours clips neither baselines nor values (without effect here)."""
    original = ModelUtils.trust_region_value_loss

    def unclipped(values: Any, old: Any, returns: Any, _: float, masks: Any) -> Any:
        return original(values, old, returns, 1e9, masks)

    ModelUtils.trust_region_value_loss = staticmethod(unclipped)


def clone_means(trainer: Any) -> None:
    """Compare continuous actions with the expert's on one scale.

    ML-Agents compares the Gaussian's sample, whose range is -3..3, with an action in -1..1. Here
    the expert's action is stretched to -3..3, and the loss divided by the square of that factor.
    """
    module = trainer.optimizer.bc_module
    module.demonstration_buffer[BufferKey.CONTINUOUS_ACTION].set(
        [
            3.0 * np.asarray(action)
            for action in module.demonstration_buffer[BufferKey.CONTINUOUS_ACTION]
        ]
    )
    loss = module._behavioral_cloning_loss
    module._behavioral_cloning_loss = lambda *args: loss(*args) / 9.0


def average_branches(trainer: Any, n: int) -> None:
    """Make SAC's policy loss, a sum over branches, the mean over them, as ours is."""
    loss = trainer.optimizer.sac_policy_loss
    trainer.optimizer.sac_policy_loss = lambda *args: loss(*args) / n


class Run:
    """Feeds messages to ML-Agents' `AgentProcessor`, and its trajectories to the trainer."""

    def __init__(self, trainer: Any, case: dict[str, Any], data: Data) -> None:
        self.trainer, self.case, self.data = trainer, case, data
        self.waiting: list[Trajectory] = []
        self.memories: dict[str, Any] = {}
        """What the critic remembers of each agent, which ML-Agents mixes up."""
        policy = trainer.policy
        horizon = case["settings"]["time_horizon"]
        self.processor = AgentProcessor(policy, BEHAVIOR, trainer.stats_reporter, horizon)
        self.processor.publish_trajectory_queue(self)
        self.ids = np.arange(len(data["groups"]), dtype=np.int32)

    def put(self, trajectory: Trajectory) -> None:
        """Append a trajectory, as a queue does."""
        self.waiting.append(trajectory)

    def all(self) -> None:
        """Process all messages, with an update after each block of them."""
        last = ActionInfo.empty()
        for number in range(len(self.data["obs"])):
            self.processor.add_experiences(*self.message(number), 0, last)
            for trajectory in self.waiting:
                self.process(trajectory)
            self.waiting.clear()
            last = self.decided(number)
            if number and number % self.case["n_messages"] == 0:
                self.trainer.update_buffer.order = None
                if self.trainer._update_policy() is False:
                    raise ValueError(f"nothing was learned after message {number}")

    def process(self, trajectory: Trajectory) -> None:
        """Process a trajectory with the critic's memory of its agent, and keep the new memory."""
        memories = getattr(self.trainer.optimizer, "critic_memory_dict", {})
        memories.clear()
        if trajectory.agent_id in self.memories:
            memories[""] = self.memories[trajectory.agent_id]
        self.trainer._process_trajectory(trajectory)
        self.memories.pop(trajectory.agent_id, None)
        if not trajectory.done_reached and memories.get("") is not None:
            self.memories[trajectory.agent_id] = memories[""]

    def message(self, number: int) -> tuple[DecisionSteps, TerminalSteps]:
        """Return the steps that the environment sends in a message."""
        names = ("obs", "last_obs", "reward", "group_reward", "ends", "mask")
        obs, last, reward, shared, ends, mask = (self.data[name][number] for name in names)
        over, groups = ends > 0, self.data["groups"]
        branches = self.case["actions"][1:]
        masks = np.split(mask, np.cumsum(branches)[:-1], axis=1) if branches else None
        gains = [np.where(over, 0.0, rewards).astype(np.float32) for rewards in (reward, shared)]
        return (
            DecisionSteps([obs], gains[0], self.ids, masks, groups, gains[1]),
            TerminalSteps(
                [last[over]], reward[over], ends[over] == 2, self.ids[over], groups[over],
                shared[over],
            ),
        )  # fmt: skip

    def decided(self, number: int) -> ActionInfo:
        """Return the agents' actions after a message."""
        data, n_continuous = self.data, self.case["actions"][0]
        log_prob = data["log_prob"][number]
        action = ActionTuple(data["continuous"][number], data["discrete"][number].astype(np.int32))
        likely = LogProbsTuple(log_prob[:, :n_continuous], log_prob[:, n_continuous:])
        if "memory" in data:
            agent_ids = [get_global_agent_id(0, agent) for agent in self.ids]
            self.trainer.policy.save_memories(agent_ids, data["memory"][number])
        outputs = {"action": action, "log_probs": likely}
        return ActionInfo(action, action, outputs, list(self.ids))


if __name__ == "__main__":
    main()
