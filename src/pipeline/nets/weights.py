"""Taking over the weights of a network that is not quite the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn


def load_matching(
    networks: Mapping[str, nn.Module], saved: Mapping[str, Mapping[str, Tensor] | None]
) -> tuple[list[str], int]:
    """Copy every saved tensor that a network has under the same name and with the same shape.

    Args:
        networks: by name; they keep their own values where nothing fits.
        saved: what `state_dict` of the networks of another run gave, by the same names; a network
            that is missing there, or None, is left as it is.

    Returns:
        What was not loaded, each with the reason, and how many tensors were.
    """
    left: list[str] = []
    n_loaded = 0
    for network_name, network in networks.items():
        theirs = saved.get(network_name)
        if theirs is None:
            continue
        own = network.state_dict()
        fitting = {}
        for name, tensor in own.items():
            if name not in theirs:
                left.append(f"{network_name}.{name} (not in the checkpoint)")
            elif theirs[name].shape != tensor.shape:
                shapes = f"{_shape(theirs[name])} there, {_shape(tensor)} here"
                left.append(f"{network_name}.{name} ({shapes})")
            else:
                fitting[name] = theirs[name]
        left += [f"{network_name}.{name} (unknown here)" for name in theirs if name not in own]
        network.load_state_dict(fitting, strict=False)
        n_loaded += len(fitting)
    return left, n_loaded


def _shape(tensor: Tensor) -> str:
    return "x".join(str(size) for size in tensor.shape) or "a number"
