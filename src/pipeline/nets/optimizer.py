"""Adam over one block of memory: small networks are bound by calls, not by arithmetic."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

# Numbers that each parameter's place is rounded up to, so that all begin at a cache line.
_ALIGNMENT = 16


class FlatAdam:
    """Adam (Kingma and Ba 2014, arXiv 1412.6980) with torch's default betas and epsilon.

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
        self._adam = torch.optim.Adam([self.flat], lr=learning_rate, fused=True)
        self.average: Callable[[Tensor], None] | None = None
        """Makes the gradient the mean over several processes, before anything is done with it."""

    @property
    def learning_rate(self) -> float:
        """Step size."""
        return float(self._adam.param_groups[0]["lr"])

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        self._adam.param_groups[0]["lr"] = value

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
        state = self._adam.state.get(self.flat)
        if not state:
            self._adam.step()  # which makes the state
            return
        # The one operation behind `torch.optim.Adam.step`, whose checks cost as much as it does.
        state["step"].add_(1)
        group = self._adam.param_groups[0]
        beta1, beta2 = group["betas"]
        with torch.no_grad():
            torch._fused_adam_(
                [self.flat],
                [self.gradient],
                [state["exp_avg"]],
                [state["exp_avg_sq"]],
                [],
                [state["step"]],
                lr=group["lr"],
                beta1=beta1,
                beta2=beta2,
                weight_decay=0.0,
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
            )

    def state_dict(self) -> dict[str, Any]:
        """Adam's moments and step count."""
        return self._adam.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what `state_dict` gave."""
        self._adam.load_state_dict(state)
