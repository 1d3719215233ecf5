"""Names of the array types in signatures."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

# float32 and int32 are the types on ML-Agents' wire; conversions happen once, at the border.
FloatArray = NDArray[np.float32]
IntArray = NDArray[np.int32]
BoolArray = NDArray[np.bool_]
AnyArray = NDArray[Any]
