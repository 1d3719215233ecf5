"""`mlagents_envs.envs.unity_pettingzoo_base_env` of ML-Agents, by rl-pipeline."""

from mlagents_envs import _missing

__getattr__ = _missing.reasons(
    {
        "UnityPettingzooBaseEnv": "what the two wrappers shared; they extend PettingZoo's own classes",
    },
    __name__,
)
