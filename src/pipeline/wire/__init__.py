"""The protocol of ML-Agents: connections, messages and side channels."""
