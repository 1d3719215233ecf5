"""Adam as a single operation, because a small network spends most of its time on calls of torch."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.adam import adam

# Inputs are tensors by name; a value may also be a list or a dataclass of tensors.
Inputs = Mapping[str, Any]
Losses = Callable[[Inputs], tuple[Tensor, tuple[Tensor, ...]]]

# The size of each parameter's place is rounded up to a multiple of this, so that every parameter
# begins at a cache line.
_ALIGNMENT = 16


class Length(NamedTuple):
    """A length of input tensors that differs between minibatches: its name and a usual value.

    If several inputs of a loss always have the same length, they share one `Length`.
    """

    name: str
    usual: int
    """A typical value; a program is compiled with it, so it must be the same in every run."""


_SAME_SHAPES: Mapping[str, Length] = {}


class FusedAdam:
    """Adam (Kingma and Ba 2014, arXiv 1412.6980) with torch's default betas and epsilon.

    The function behind `torch.optim.Adam(fused=True)` is called directly, because torch's class
    imports torch's compiler at its first step, which takes a second. `state_dict` has the form of
    torch's class.
    """

    BETAS, EPSILON = (0.9, 0.999), 1e-8

    def __init__(self, parameters: Iterable[nn.Parameter], *, learning_rate: float) -> None:
        self.trained = list(parameters)
        self.learning_rate = learning_rate
        self._state = [
            {
                "step": torch.zeros((), device=parameter.device),
                "exp_avg": torch.zeros_like(parameter, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
            }
            for parameter in self.trained
        ]

    @torch.no_grad()
    def step(self) -> None:
        """Make one step; parameters without a gradient do not change."""
        moving = [
            (parameter, parameter.grad, state)
            for parameter, state in zip(self.trained, self._state, strict=True)
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
        """Return the moments and step counts of parameters in the form of `torch.optim.Adam`.

        Parameters that have never had a gradient are left out.
        """
        group = {
            "lr": self.learning_rate,
            "betas": self.BETAS,
            "eps": self.EPSILON,
            "params": list(range(len(self.trained))),
        }
        # As in torch, a parameter that never had a gradient has no state.
        moved = {i: state for i, state in enumerate(self._state) if state["step"] > 0}
        return {"state": moved, "param_groups": [group]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned; moments missing in it are set to 0."""
        (group,) = state["param_groups"]
        if len(group["params"]) != len(self.trained):
            raise ValueError(
                f"the optimizer's state has {len(group['params'])} parameters, but the network "
                f"has {len(self.trained)}; the state is of another network"
            )
        self.learning_rate = group["lr"]
        for index, moments in enumerate(self._state):
            saved = state["state"].get(index, {})
            for name, values in moments.items():
                values.copy_(saved[name]) if saved else values.zero_()


class FlatAdam(FusedAdam):
    """`FusedAdam` with all parameters in one block of memory.

    Parameters become views of one flat tensor, and their gradients views of another: a step is one
    operation for any number of parameters. The result equals the result of `torch.optim.Adam` over
    the separate parameters.

    Args:
        parameters: parameters to train, all on one device; they must stay on it.
        learning_rate: initial value of the attribute `learning_rate`.
        pairs: pairs of parameters of one shape, which become adjacent in memory.

    Attributes:
        paired: each pair as one parameter [2, ...]. It shares the memory of the two parameters'
            values and gradients, so that a loss may use it together with the two parameters or
            instead of them.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        learning_rate: float,
        pairs: Sequence[tuple[nn.Parameter, nn.Parameter]] = (),
    ) -> None:
        # A parameter that two networks share is listed twice, but gets only one place.
        self.parameters = list(dict.fromkeys(parameters))
        self._places = _places(self.parameters, pairs)
        first = self.parameters[0]
        # Gaps between places are 0 in parameters and gradient, so that no norm changes.
        size = max(place.stop for place in self._places)
        size = -(-size // _ALIGNMENT) * _ALIGNMENT
        self.flat = nn.Parameter(torch.zeros(size, dtype=first.dtype, device=first.device))
        gradient = self.flat.grad = torch.zeros_like(self.flat)
        self.gradients: list[tuple[nn.Parameter, Tensor]] = []
        """(parameter, gradient) of each parameter, then of each pair: views of `gradient`."""
        for parameter, place in zip(self.parameters, self._places, strict=True):
            self.flat.data[place] = parameter.detach().flatten()
            # The parameter's data is moved, but the `Parameter` is the same object as before,
            # because modules refer to this object.
            parameter.data = self.flat.data[place].view_as(parameter)
            self.gradients.append((parameter, gradient[place].view_as(parameter)))
        self.paired: list[nn.Parameter] = []
        for first_of_pair, _ in pairs:
            start, shape = first_of_pair.storage_offset(), (2, *first_of_pair.shape)
            place = slice(start, start + 2 * first_of_pair.numel())
            self.paired.append(nn.Parameter(self.flat.detach()[place].view(shape)))
            self.gradients.append((self.paired[-1], gradient[place].view(shape)))
        super().__init__([self.flat], learning_rate=learning_rate)
        self.average: Callable[[Tensor], None] | None = None
        """Function that replaces the gradient by its mean over processes; None with one process."""
        self.compiled: Callable[..., list[Tensor]] | None = None
        """Compiled function that makes the steps of `descend`; None to use torch's `backward`."""
        self.compile_s = 0.0
        """Seconds that compilation has taken so far."""

    def zero_gradients(self) -> None:
        """Set the gradients to 0, even if another optimizer has replaced the gradient tensors."""
        self.gradient.zero_()
        for parameter, gradient in self.gradients:
            parameter.grad = gradient

    @property
    def gradient(self) -> Tensor:
        """All gradients as one flat vector."""
        gradient = self.flat.grad
        if gradient is None:
            raise ValueError("the flat gradient was removed; clear it only by `zero_gradients`")
        return gradient

    def descend(
        self,
        losses: Losses,
        inputs: Inputs,
        *,
        max_norm: float | None = None,
        lengths: Mapping[str, Length] | None = _SAME_SHAPES,
    ) -> list[Tensor]:
        """Make one step that lowers a loss; return the other results of `losses`, detached.

        Args:
            losses: function that returns the scalar loss and other results, which depend only on
                the inputs, parameters and buffers; the same function at every call.
            inputs: tensors [B, ...], other tensors, or lists of tensors, by name.
            max_norm: norm to which a longer gradient is scaled down, as in `step`.
            lengths: `Length` of each input whose length differs between minibatches, by name; all
                other inputs always have the same shape. None if the shapes of minibatches rarely
                recur, so that they are not worth a compiled program.
        """
        if self.compiled and lengths is not None:
            # torch would compile another program for a length of 0 or 1.
            n_rows = (len(tensor) for name, tensor in flat_inputs(inputs) if name in lengths)
            if not lengths or all(n > 1 for n in n_rows):
                return self.compiled(losses, inputs, lengths, max_norm=max_norm)
        loss, results = losses(inputs)
        self.minimize(loss, max_norm=max_norm)
        return [result.detach() for result in results]

    def minimize(self, loss: Tensor, *, max_norm: float | None = None) -> None:
        """Make one step that lowers the scalar `loss`; for `max_norm` see `step`."""
        self.zero_gradients()
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.step(max_norm=max_norm)

    def step(self, *, max_norm: float | None = None) -> None:
        """Make one step; a gradient longer than `max_norm` is scaled down to it first."""
        if self.average is not None:
            # The gradient is averaged before it is clipped, so that every process clips by the mean
            # gradient's norm.
            self.average(self.gradient)
        if max_norm is not None:
            # The flat tensor is a single parameter, so the norm is over all parameters together.
            nn.utils.clip_grad_norm_([self.flat], max_norm)
        super().step()

    def next_move(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Count one more step; return the parameters, moments and scales for `adam_step`."""
        (state,) = self._state
        n, (beta1, beta2) = int(state["step"]) + 1, self.BETAS
        state["step"].fill_(n)
        # NumPy makes a small array in a tenth of torch's time.
        scales = [self.learning_rate / (1.0 - beta1**n), (1.0 - beta2**n) ** -0.5]
        step_scales = torch.from_numpy(np.array(scales, np.float32)).to(self.flat.device)
        return self.flat.detach(), state["exp_avg"], state["exp_avg_sq"], step_scales

    def take_back_move(self) -> None:
        """Do not count the step of the last `next_move`, which was not made."""
        self._state[0]["step"] -= 1

    def state_dict(self) -> dict[str, Any]:
        """Return Adam's moments, in the order of the parameters, and the number of steps."""
        return self._reordered(super().state_dict(), self._places, _places(self.parameters))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        places = _places(self.parameters)
        super().load_state_dict(self._reordered(dict(state), places, self._places))

    def _reordered(
        self, state: dict[str, Any], before: Sequence[slice], after: Sequence[slice]
    ) -> dict[str, Any]:
        """Return Adam's state, with the moments of each parameter moved from `before` to `after`.

        Both list each parameter's place in a flat tensor.
        """
        # Checkpoints have the moments in the order of the parameters, whatever places in memory the
        # parameters have.
        if before == after or not state["state"]:
            return state
        moved = dict(state["state"][0])
        for name in ("exp_avg", "exp_avg_sq"):
            size = -(-max(place.stop for place in after) // _ALIGNMENT) * _ALIGNMENT
            values = moved[name]
            moved[name] = values.new_zeros(size)
            for old, new in zip(before, after, strict=True):
                moved[name][new] = values[old]
        return {**state, "state": {0: moved}}


def adam_step(
    gradient: Tensor,
    parameters: Tensor,
    mean: Tensor,
    mean_square: Tensor,
    scales: Tensor,
    *,
    max_norm: float | None = None,
) -> None:
    """Make one step of Adam in place on vectors [n]; the operations can be compiled.

    `mean` and `mean_square` are the first and the second moment. `scales` [2] are the bias
    corrections of step t (arXiv 1412.6980, algorithm 1): the learning rate over 1 - beta1^t, and 1
    over the root of 1 - beta2^t. A gradient longer than `max_norm` is scaled down first.
    """
    beta1, beta2 = FusedAdam.BETAS
    if max_norm is not None:
        norm = torch.linalg.vector_norm(gradient)
        # 1e-6 is added as in torch's `clip_grad_norm_`, so that compiled steps equal other steps.
        gradient.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
    mean.lerp_(gradient, 1.0 - beta1)
    mean_square.mul_(beta2).addcmul_(gradient, gradient, value=1.0 - beta2)
    parameters.sub_(scales[0] * mean / (mean_square.sqrt() * scales[1] + FusedAdam.EPSILON))


def flat_inputs(inputs: Inputs) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors with their names, the tensors of a list one after another.

    A field of a dataclass is called `<name of the dataclass>.<name of the field>`.
    """
    for name, value in inputs.items():
        for part in value if isinstance(value, list) else (value,):
            if isinstance(part, Tensor):
                yield name, part
            elif is_dataclass(part):
                named = {
                    f"{name}.{entry.name}": getattr(part, entry.name) for entry in fields(part)
                }
                yield from flat_inputs(named)


def with_tensors(inputs: Inputs, tensors: Iterator[Tensor]) -> dict[str, Any]:
    """Return a copy of `inputs` with `tensors` in place of its tensors, in `flat_inputs`' order."""

    def other(value: Any) -> Any:
        if isinstance(value, Tensor):
            return next(tensors)
        if isinstance(value, list):
            return [other(part) for part in value]
        if is_dataclass(value) and not isinstance(value, type):
            parts = {entry.name: other(getattr(value, entry.name)) for entry in fields(value)}
            return replace(value, **parts)
        return value

    return {name: other(value) for name, value in inputs.items()}


def _places(
    parameters: Sequence[nn.Parameter], pairs: Sequence[tuple[nn.Parameter, nn.Parameter]] = ()
) -> list[slice]:
    """Return the place of each of `parameters` in a flat tensor; pairs get adjacent places."""
    second_of = dict(pairs)
    seconds = set(second_of.values())
    start, place_of = 0, {}
    for parameter in parameters:
        # The second parameter of a pair got its place together with the first.
        if parameter in seconds:
            continue
        neighbours = [parameter, second_of[parameter]] if parameter in second_of else [parameter]
        for neighbour in neighbours:
            place_of[neighbour] = slice(start, start + neighbour.numel())
            start += neighbour.numel()
        start = -(-start // _ALIGNMENT) * _ALIGNMENT
    return [place_of[parameter] for parameter in parameters]
