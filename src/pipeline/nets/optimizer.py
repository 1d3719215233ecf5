"""Adam in one operation: small networks are bound by calls, not by arithmetic."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.adam import adam

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

# Numbers that each parameter's place is rounded up to, so that all begin at a cache line.
_ALIGNMENT = 16


class FusedAdam:
    """Adam (Kingma and Ba 2014, arXiv 1412.6980) with torch's default betas and epsilon.

    The function behind `torch.optim.Adam(fused=True)`, without the class around it: the class
    imports torch's compiler at its first step, which takes a second. States have the same form.

    Args:
        parameters: what to train.
        learning_rate: step size until `learning_rate` is set.
    """

    BETAS, EPSILON = (0.9, 0.999), 1e-8

    def __init__(self, parameters: Iterable[nn.Parameter], *, learning_rate: float) -> None:
        self.parameters = list(parameters)
        self.learning_rate = learning_rate
        self._state = [
            {
                "step": torch.zeros((), device=parameter.device),
                "exp_avg": torch.zeros_like(parameter, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
            }
            for parameter in self.parameters
        ]

    @torch.no_grad()
    def step(self) -> None:
        """Move along the gradients; parameters without one stay."""
        moving = [
            (parameter, parameter.grad, state)
            for parameter, state in zip(self.parameters, self._state, strict=True)
            if parameter.grad is not None
        ]
        if not moving:
            return
        adam(
            [parameter for parameter, _, _ in moving],
            [gradient for _, gradient, _ in moving],
            [state["exp_avg"] for _, _, state in moving],
            [state["exp_avg_sq"] for _, _, state in moving],
            [],
            [state["step"] for _, _, state in moving],
            fused=True,
            lr=self.learning_rate,
            beta1=self.BETAS[0],
            beta2=self.BETAS[1],
            weight_decay=0.0,
            eps=self.EPSILON,
            amsgrad=False,
            maximize=False,
        )

    def state_dict(self) -> dict[str, Any]:
        """Moments and step counts of what has moved, as `torch.optim.Adam` gives them."""
        group = {
            "lr": self.learning_rate,
            "betas": self.BETAS,
            "eps": self.EPSILON,
            "params": list(range(len(self.parameters))),
        }
        moved = {i: state for i, state in enumerate(self._state) if state["step"] > 0}
        return {"state": moved, "param_groups": [group]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` gave; parameters that it leaves out have not moved yet."""
        (group,) = state["param_groups"]
        if len(group["params"]) != len(self.parameters):
            raise ValueError(
                f"the optimizer's state is of {len(group['params'])} parameters; there are "
                f"{len(self.parameters)}"
            )
        self.learning_rate = group["lr"]
        for index, own in enumerate(self._state):
            saved = state["state"].get(index, {})
            for name, values in own.items():
                values.copy_(saved[name]) if saved else values.zero_()


class FlatAdam:
    """`FusedAdam` over one block of memory.

    The parameters move into one flat tensor that they become views of, and so do their gradients:
    a step is one operation however many parameters there are. The result is that of
    `torch.optim.Adam` over the separate parameters.

    Args:
        parameters: what to train; on one device, and to stay there.
        learning_rate: step size until `learning_rate` is set.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], *, learning_rate: float) -> None:
        self.parameters = list(dict.fromkeys(parameters))
        rounded = [-(-p.numel() // _ALIGNMENT) * _ALIGNMENT for p in self.parameters]
        first = self.parameters[0]
        self.flat = nn.Parameter(torch.zeros(sum(rounded), dtype=first.dtype, device=first.device))
        self.flat.grad = torch.zeros_like(self.flat)
        self._gradients = []
        start = 0
        for parameter, size in zip(self.parameters, rounded, strict=True):
            part = slice(start, start + parameter.numel())
            self.flat.data[part] = parameter.detach().flatten()
            parameter.data = self.flat.data[part].view_as(parameter)
            self._gradients.append(self.flat.grad[part].view_as(parameter))
            start += size
        self._adam = FusedAdam([self.flat], learning_rate=learning_rate)
        self.average: Callable[[Tensor], None] | None = None
        """Makes the gradient the mean over several processes, before anything is done with it."""

    @property
    def learning_rate(self) -> float:
        """Step size."""
        return self._adam.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        self._adam.learning_rate = value

    def zero_gradients(self) -> None:
        """Forget the gradients, those of other optimizers of the same parameters included."""
        self.gradient.zero_()
        for parameter, gradient in zip(self.parameters, self._gradients, strict=True):
            parameter.grad = gradient

    @property
    def gradient(self) -> Tensor:
        """All gradients as one vector."""
        gradient = self.flat.grad
        if gradient is None:
            raise ValueError("the flat gradient was taken away")
        return gradient

    def step(self, *, max_norm: float | None = None) -> None:
        """Move along the gradients, first shortened to `max_norm` if they are longer."""
        if self.average is not None:
            self.average(self.gradient)
        if max_norm is not None:
            nn.utils.clip_grad_norm_([self.flat], max_norm)
        self._adam.step()

    def state_dict(self) -> dict[str, Any]:
        """Adam's moments and step count."""
        return self._adam.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what `state_dict` gave."""
        self._adam.load_state_dict(state)
