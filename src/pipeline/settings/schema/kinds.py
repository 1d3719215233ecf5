"""Numbers with limits, and the words that several settings allow."""

from typing import Annotated, Literal

from pipeline.settings.reader import Limits

Count = Annotated[int, Limits(at_least=1)]
"""A whole number from 1."""
CountOrZero = Annotated[int, Limits(at_least=0)]
"""A whole number from 0."""
CountOrUnlimited = Annotated[int, Limits(at_least=-1)]
"""A whole number from 0, or -1 for no limit (or none chosen)."""
Fraction = Annotated[float, Limits(at_least=0, at_most=1)]
"""A number in [0, 1]."""
NonNegative = Annotated[float, Limits(at_least=0)]
"""A number from 0."""
Positive = Annotated[float, Limits(above=0)]
"""A number above 0."""

Schedule = Literal["linear", "constant"]
"""How a value falls over training: to (nearly) zero at max_steps, or not at all."""
VisualEncoder = Literal["simple", "nature_cnn", "resnet", "match3", "fully_connected"]
"""Which network reads pictures."""
GoalConditioning = Literal["hyper", "none"]
"""Whether goal observations drive a hypernetwork, or are read like the others."""
