"""Short names of array types, for use in signatures."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

# ML-Agents' messages have float32 and int32 arrays; arrays of other types are converted once, when
# an environment or a caller gives them.
FloatArray = NDArray[np.float32]
IntArray = NDArray[np.int32]
BoolArray = NDArray[np.bool_]
AnyArray = NDArray[Any]
