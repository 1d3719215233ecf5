"""`mlagents_envs.registry.base_registry_entry` of ML-Agents, by rl-pipeline."""

from mlagents_envs import _missing

__getattr__ = _missing.reasons(
    {
        "BaseRegistryEntry": "no base class is needed: `register` takes what has `identifier` and `make`",
    },
    __name__,
)
