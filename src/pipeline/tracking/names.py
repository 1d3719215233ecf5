"""The names of a run's statistics, with their meaning and unit.

Statistics that ML-Agents also has keep ML-Agents' names. `<Signal>` is the name of a reward signal
with an upper-case first letter: Extrinsic, Curiosity, Gail, Rnd.
"""

# Scripts and dashboards for ML-Agents read these names, so the names never change.
REWARD = "Environment/Cumulative Reward"
EPISODE_LENGTH = "Environment/Episode Length"
GROUP_REWARD = "Environment/Group Cumulative Reward"
ELO = "Self-play/ELO"
LEARNING_RATE = "Policy/Learning Rate"
ENTROPY = "Policy/Entropy"
POLICY_LOSS = "Losses/Policy Loss"
VALUE_LOSS = "Losses/Value Loss"
REWARD_STD = "Environment/Reward Std"
LESSON_NUMBER = "Environment/Lesson Number/"
"""Prefix of the names of lesson numbers."""
IS_TRAINING = "Is Training"

MEANING = {
    REWARD: "mean return of the episodes that ended in the period; environment reward",
    GROUP_REWARD: "mean return of the groups' episodes; environment reward",
    EPISODE_LENGTH: "mean number of decisions in an episode, minus one",
    "Environment/Lesson Number/<parameter>": "index of the lesson in force, from 0",
    "Environment/Parameter/<parameter>": "mean of the values that the environment has read",
    "Policy/<Signal> Reward": "sum of the signal's reward times its strength; mean over episodes",
    "Policy/<Signal> Value Estimate": "mean value that the critic gives (PPO, POCA)",
    "Policy/<Signal> Value": "mean value that the critic gives (SAC, XQC)",
    "Policy/<Signal> Baseline Estimate": "mean counterfactual baseline (POCA)",
    ENTROPY: "mean entropy of the policy while acting; nats",
    LEARNING_RATE: "present learning rate of the optimizer",
    "Policy/Epsilon": "present clipping range (PPO, POCA)",
    "Policy/approx_kl": "estimated divergence from the policy that acted; nats (PPO)",
    "Policy/clip_fraction": "share of the ratios that were clipped; 0 to 1 (PPO)",
    "Policy/explained_variance": "share of the returns' variance that values explain (PPO)",
    "Policy/Beta": "present weight of the entropy bonus (PPO, POCA)",
    "Policy/Discrete Entropy Coeff": "temperature of the discrete branches (SAC, XQC)",
    "Policy/Continuous Entropy Coeff": "temperature of the continuous actions (SAC, XQC)",
    "Policy/Clipped Return Share": "share of the targets' returns beyond -5..5; 0 to 1 (XQC)",
    POLICY_LOSS: "loss of the policy; absolute value for PPO and POCA",
    VALUE_LOSS: "loss of the critic",
    "Losses/Baseline Loss": "loss of the counterfactual baseline (POCA)",
    "Losses/Q1 Loss": "loss of the first action-value network (SAC, XQC)",
    "Losses/Q2 Loss": "loss of the second action-value network (SAC, XQC)",
    "Losses/Curiosity Forward Loss": "error of the predicted next features",
    "Losses/Curiosity Inverse Loss": "error of the predicted action",
    "Losses/GAIL Loss": "loss of the discriminator",
    "Losses/GAIL KL Loss": "divergence of the discriminator's code from its prior; nats",
    "Losses/RND Loss": "error of the predicted random features",
    "Losses/Pretraining Loss": "loss of behavioral cloning",
    "Policy/GAIL Policy Estimate": "mean discriminator output on the policy's steps; 0 to 1",
    "Policy/GAIL Expert Estimate": "mean discriminator output on the demonstrations; 0 to 1",
    "Policy/GAIL Grad Mag Loss": "gradient penalty of the discriminator",
    "Policy/GAIL Beta": "weight of the divergence in the discriminator's loss",
    ELO: "rating of the learning team",
    REWARD_STD: "standard deviation of the ended episodes' returns; environment reward",
    "Time/<part>": "wall time that a part of training took in the period; seconds",
    IS_TRAINING: "1 while the behavior learns, 0 past its last step; not charted",
}

HIDDEN = frozenset({IS_TRAINING})
"""Statistics for the console that sinks do not write."""

HISTOGRAM = "_hist"
"""Suffix of the name of a histogram, as in `Environment/Cumulative Reward_hist`."""

TIMING = "Time/"
"""Prefix of wall times, which differ between equal runs and so are not in files that DVC tracks."""
