"""Fuzz tests: random input from outside is accepted, or refused with a message of one line."""
