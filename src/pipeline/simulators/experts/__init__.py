"""Scripted policies of the simulators, one module each; they see only what an agent sees.

They record demonstrations, stand for the best that can be expected, and are opponents to beat.
"""
