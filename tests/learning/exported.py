"""Training of a toy's policy, and the policy's returns after its export."""

import pipeline
from pipeline.dag.stages.export import publish
from pipeline.envs.in_process import InProcessEnvironment
from pipeline.evaluation.episodes import evaluate
from pipeline.export.policy import OnnxPolicy


def trained(toy, behavior, folder, *, seed):
    """Return the result of training in a toy with the settings `behavior`."""
    run = {"behaviors": {"Toy": behavior}}
    result = pipeline.train(InProcessEnvironment(toy(seed=seed)), run, seed=seed, run_dir=folder)
    return result.behaviors["Toy"]


def played(result, toy, folder, *, seed, episodes=200):
    """Return episodes of the exported policy's most likely actions in a toy of another seed."""
    publish(result.checkpoint, folder)
    exported = OnnxPolicy(folder / "Toy.onnx")
    with InProcessEnvironment(toy(seed=seed + 100)) as environment:
        return evaluate(environment, {"Toy": exported}, episodes=episodes, seed=seed)


def exported_return(result, toy, folder, *, seed, episodes=200):
    """Return the mean return of the episodes of `played`."""
    played_episodes = played(result, toy, folder, seed=seed, episodes=episodes)
    return sum(episode.episode_return for episode in played_episodes) / len(played_episodes)
