"""Every key of a flat section, and where its value stands in the present format."""

from __future__ import annotations

CLONING_TRAINERS = ("imitation", "online_bc", "offline_bc")
"""Trainers that only imitated; `imitation` until 0.5, the others from 0.6 to 0.12."""

_HYPERPARAMETERS = (
    "batch_size",
    "buffer_size",
    "learning_rate",
    "learning_rate_schedule",
    "beta",
    "epsilon",
    "lambd",
    "num_epoch",
    "buffer_init_steps",
    "init_entcoef",
    "save_replay_buffer",
    "tau",
    "steps_per_update",
)
_NETWORK = ("normalize", "hidden_units", "num_layers", "vis_encode_type")
_BEHAVIOR = (
    "max_steps",
    "time_horizon",
    "summary_freq",
    "keep_checkpoints",
    "init_path",
    "threaded",
)

MOVED: dict[str, tuple[str, ...]] = (
    {key: ("hyperparameters", key) for key in _HYPERPARAMETERS}
    | {key: ("network_settings", key) for key in _NETWORK}
    | {"vis_encoder_type": ("network_settings", "vis_encode_type")}
    | {key: (key,) for key in _BEHAVIOR}
)
"""Keys whose value only has another place."""

_SET_BY_PROGRAM = "ML-Agents set it itself; runs are written below checkpoint_settings.results_dir"
_NO_TEACHER = "nobody is imitated while playing any more; name a demonstration in demo_path"
GONE: dict[str, str] = {
    "summary_path": _SET_BY_PROGRAM,
    "model_path": _SET_BY_PROGRAM,
    "graph_scope": _SET_BY_PROGRAM,
    "burn_in_ratio": "sequences are trained on from their first step",
    "brain_to_imitate": _NO_TEACHER,
    "batches_per_epoch": "see behavioral_cloning.samples_per_update and num_epoch",
}
"""Keys without an equal: why, and what to use."""

HANDLED = (
    "trainer",
    "gamma",
    "reward_signals",
    "use_curiosity",
    "curiosity_strength",
    "curiosity_enc_size",
    "use_recurrent",
    "sequence_length",
    "memory_size",
    "num_update",
    "train_interval",
    "pretraining",
    "behavioral_cloning",
    "self_play",
    "demo_path",
    "curriculum",
)
"""Keys that become something of another shape."""

FLAT_KEYS = {*MOVED, *GONE, *HANDLED}
"""Every key that a section of a flat file may have."""

_ALWAYS = (
    "batch_size",
    "buffer_size",
    "hidden_units",
    "learning_rate",
    "max_steps",
    "normalize",
    "num_layers",
    "time_horizon",
    "summary_freq",
    "use_recurrent",
)
REQUIRED: dict[str, tuple[str, ...]] = {
    "ppo": (*_ALWAYS, "beta", "epsilon", "lambd", "num_epoch"),
    "sac": (*_ALWAYS, "buffer_init_steps", "init_entcoef", "tau"),
}
"""Keys without which ML-Agents did not start, beside those that went by another name later."""

SIGNAL_KEYS = (
    "strength",
    "gamma",
    "encoding_size",
    "learning_rate",
    "demo_path",
    "use_actions",
    "use_vail",
)
"""Keys of a reward signal."""
SIGNAL_UPDATES = ("reward_signal_num_update", "reward_signal_steps_per_update")
"""Keys of SAC that stood beside the reward signals."""
CLONING_KEYS = (
    "demo_path",
    "strength",
    "steps",
    "batch_size",
    "num_epoch",
    "samples_per_update",
)
"""Keys of `pretraining` and `behavioral_cloning`."""
SELF_PLAY_KEYS = {
    "window": "window",
    "play_against_current_self_ratio": "play_against_latest_model_ratio",
    "play_against_latest_model_ratio": "play_against_latest_model_ratio",
    "save_steps": "save_steps",
    "swap_steps": "swap_steps",
    "team_change": "team_change",
    "initial_elo": "initial_elo",
}
"""Keys of `self_play`, and what they are called today."""
