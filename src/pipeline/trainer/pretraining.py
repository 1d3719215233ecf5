"""Pretraining: behavioral cloning of demonstrations into an initial policy."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from pipeline import files, seeding
from pipeline.algos.bc import BehavioralCloning, hold_out
from pipeline.demos.demo_file import read_demo
from pipeline.demos.demonstrations import ExpertRows, demonstration_files, load_expert_rows
from pipeline.errors import DemonstrationError, SettingsError
from pipeline.settings import RunSettings
from pipeline.trainer.checkpoints.file import RESUME_FILE, description, save_checkpoint
from pipeline.trainer.learner import Learner

# Share of the demonstrated steps that are held out: the policy does not learn from these steps, and
# its loss on them is measured.
CHECKED = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class PretrainResult:
    """Results of pretraining one behavior."""

    behavior: str
    n_rows: int
    """Number of demonstrated steps to learn from, without the held-out steps."""
    epochs: int
    loss: float
    """Mean imitation loss of the last epoch."""
    held_out_loss: float
    """Imitation loss on the held-out steps, after the last epoch."""
    losses: Sequence[tuple[float, float]]
    """(loss, held-out loss) after each epoch."""
    checkpoint: Path


def pretrain(
    demos: Sequence[Path | str],
    settings: RunSettings,
    *,
    seed: int,
    run_dir: Path | str,
    epochs: int,
    batch_size: int,
    learning_rate: float,
    device: str = "cpu",
) -> PretrainResult:
    """Train the policy of one behavior to act as demonstrated.

    Args:
        demos: demonstration files or folders, all of one behavior.
        settings: settings of the run that will start from the policy; they define the networks.
        seed: seed of the run.
        run_dir: folder of the run; the checkpoint is written into the behavior's folder there.
        epochs: passes over the demonstrations.
        batch_size: demonstrated steps in a minibatch.
        learning_rate: Adam's learning rate.
        device: device of the networks.

    Raises:
        DemonstrationError: A demonstration cannot be used.
    """
    if not demos:
        raise DemonstrationError("demos is empty; give '.demo' files, or folders with such files")
    file = demonstration_files(demos[0])[0]
    first = read_demo(file)
    # The suffix `?team=` is removed, because the teams of a behavior share one policy.
    name, spec = first.behavior_name.partition("?")[0], first.spec
    try:
        path = files.named(run_dir, name) / RESUME_FILE
        chosen_settings = settings.for_behavior(name)
    except SettingsError as error:
        raise DemonstrationError(f"{file}: it shows the behavior {name}. {error}") from error
    # All files are read with the specification of the first file; other specifications are refused.
    rows = load_expert_rows(demos, spec)
    memory = chosen_settings.network_settings.memory
    train_rows, check_rows = hold_out(
        rows,
        CHECKED,
        seeding.stream(seed, "held-out"),
        # A recurrent policy learns from whole sequences, so whole sequences are held out.
        sequence_length=0 if memory is None else memory.sequence_length,
    )
    torch_device = torch.device(device)
    learner = Learner(name, spec, chosen_settings, seed=seed, device=torch_device)
    policy = learner.algorithm.trained_policy

    def on(part: ExpertRows) -> BehavioralCloning:
        return BehavioralCloning(
            policy,
            part,
            batch_size=batch_size,
            # Each `update` makes one pass, so that the loss is known after each epoch.
            num_epoch=1,
            learning_rate=learning_rate,
            seed=seed,
        )

    # If there are too few steps to hold any out, the loss is measured on the training steps.
    cloning, check = on(train_rows), on(check_rows if len(check_rows) else train_rows)
    # The normalizers must have the demonstrated observations before the first epoch.
    cloning.observe()
    losses = []
    for _ in range(epochs):
        policy.train()
        loss = cloning.update()
        policy.eval()
        losses.append((loss, check.measure()))
    learner.record(train_rows.obs, {})
    learner_state = learner.state_dict()
    # The critic was not trained; a training run makes its own critic, with an output for each
    # reward signal.
    learner_state["algorithm"]["critic"] = None
    state = {**description(name, spec, settings), "learner": learner_state}
    # A run must not train in this folder now: it would overwrite the checkpoint, or resume from it.
    with files.sole_writer(run_dir):
        save_checkpoint(path, state)
    return PretrainResult(
        behavior=name,
        n_rows=len(train_rows),
        epochs=epochs,
        loss=losses[-1][0],
        held_out_loss=losses[-1][1],
        losses=losses,
        checkpoint=path,
    )
