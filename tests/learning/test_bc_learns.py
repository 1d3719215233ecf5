"""Behavioral cloning alone brings a policy's return near the return of the expert."""

import numpy as np
from crowds import LargestName
from exported import exported_return

from pipeline.algos.policy import generator_for
from pipeline.core.specs import ActionTuple
from pipeline.dag.stages.demos import write_episodes
from pipeline.demos.demo_file import writing_demo
from pipeline.envs.in_process import InProcessEnvironment
from pipeline.settings import load_run_settings
from pipeline.simulators import registry
from pipeline.trainer import pretrain
from pipeline.trainer.checkpoints.restore import load_policy

EPISODES = 12


def pretrained(behavior, network, folder, seed, **options):
    """Clone the demonstration `expert.demo` in ten epochs."""
    overrides = {"behaviors": {behavior: {"network_settings": network}}}
    settings, demo = load_run_settings(None, overrides=overrides), folder / "expert.demo"
    return pretrain([demo], settings, seed=seed, run_dir=folder, epochs=10, **options)


def episodes(act, *, seed):
    """Return the mean return of the first episode of each platform."""
    simulator = registry.make("balance_ball", seed=seed, n_agents=EPISODES)
    ((name, (decision, _)),) = simulator.reset().items()
    total, is_first = np.zeros(EPISODES), np.ones(EPISODES, dtype=bool)
    while is_first.any():
        ((decision, terminal),) = simulator.step({name: act(decision)}).values()
        total[decision.agent_id] += np.where(is_first, decision.reward, 0.0)
        total[terminal.agent_id] += np.where(is_first[terminal.agent_id], terminal.reward, 0.0)
        is_first[terminal.agent_id] = False
    simulator.close()
    return total.mean()


def test_cloned_policy_keeps_the_ball_at_least_four_fifths_as_long_as_the_expert(
    seed, tmp_path, note
):
    expert = registry.expert("balance_ball")
    with InProcessEnvironment(registry.make("balance_ball", seed=seed, n_agents=EPISODES)) as env:
        env.reset()
        write_episodes(env, expert, tmp_path / "expert.demo", episodes=EPISODES)
    network = {"normalize": True, "hidden_units": 64, "num_layers": 2, "deterministic": True}
    options = {"batch_size": 128, "learning_rate": 2e-3}
    result = pretrained("3DBall", network, tmp_path, seed, **options)
    policy = load_policy(result.checkpoint).policy
    stream = generator_for(seed, next(policy.parameters()).device, "unused")

    def cloned(decision):
        return policy.act(decision.obs, None, stream).action

    def untaught(decision):
        return policy.spec.action_spec.empty_action(len(decision))

    taught_by = episodes(expert, seed=seed + 100)
    share = episodes(cloned, seed=seed + 100) / taught_by
    note("cloning balance_ball's expert, share of its return", share, threshold=0.8, steps=0)
    assert share >= 0.8
    assert episodes(untaught, seed=seed + 100) < 0.2 * taught_by


def test_cloned_policy_finds_the_largest_of_a_changing_number_of_entities(seed, tmp_path, note):
    """The best return is 4; choosing the name of a random present entity gives 1.8."""
    with writing_demo(tmp_path / "expert.demo", "Toy?team=0", LargestName.spec) as writer:
        toy = LargestName(seed=seed, n_agents=4000)
        ((decision, _),) = toy.reset().values()
        entities = decision.obs[0]
        largest = entities[:, :, 0].argmax(axis=1)
        name = entities[np.arange(len(entities)), largest, 1:].argmax(axis=1)
        writer.append(
            obs=[entities],
            actions=ActionTuple(discrete=name[:, None]),
            reward=np.ones(len(name), dtype=np.float32),
            done=np.zeros(len(name), dtype=np.bool_),
        )
    network = {"hidden_units": 32, "num_layers": 2}
    result = pretrained("Toy", network, tmp_path, seed, batch_size=64, learning_rate=1e-3)
    mean_return = exported_return(result, LargestName, tmp_path, seed=seed)
    note("cloning over entities, exported", mean_return, threshold=3.6, steps=0)
    assert mean_return >= 3.6
