"""Scripted policies of the simulators with several agents: experts, and opponents to beat."""
