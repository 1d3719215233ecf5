"""`torch_settings.compile`: a loss, its derivative and Adam's step as one compiled program.

A small network is bound by calls: a quarter of a gradient step is arithmetic, and the rest is calls
of torch and the graph that it keeps for `backward`. So all of a step is traced once, into
operations without a graph, and torch's compiler makes one program of those: on the CPU, in C++.
"""

from __future__ import annotations

import functools
import gc
import itertools
import logging
import os
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from pipeline.nets.encoder import HyperLayer
from pipeline.nets.fast.adam import (
    FlatAdam,
    Inputs,
    Length,
    Losses,
    adam_step,
    flat_inputs,
    with_tensors,
)
from pipeline.nets.layers import IS_TRACED
from pipeline.nets.memory import Memory

_log = logging.getLogger(__name__)


def compiler() -> str | None:
    """The C++ compiler that torch would use on the CPU; None where it is not installed."""
    return shutil.which(os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++"))


def compile_steps(optimizer: FlatAdam, networks: Iterable[nn.Module]) -> None:
    """Have the steps of an optimizer of `networks` compiled from now on, where that can be done."""
    if optimizer.flat.device.type == "cpu" and compiler() is None:
        _log.warning(
            "torch_settings.compile: no C++ compiler is installed here (g++, or what CXX "
            "names), so nothing is compiled."
        )
        return
    modules = [module for network in networks for module in network.modules()]
    if any(isinstance(module, HyperLayer) for module in modules):
        # its work depends on how many goals a minibatch has
        _log.warning(
            "torch_settings.compile: networks with a goal signal and goal_conditioning_type "
            "hyper are not compiled."
        )
        return
    # Minibatches of sequences differ in their number of rows.
    if not any(isinstance(module, Memory) for module in modules):
        optimizer.compiled = CompiledSteps(optimizer)


class CompiledSteps:
    """Steps of an optimizer down one loss, in a program for each shape of minibatch.

    Where lengths differ from minibatch to minibatch, one program takes any of them. The same
    program on the same machine gives the same bytes; `backward` adds up sums in another order.

    Args:
        optimizer: what moves the parameters, and holds their gradient.
    """

    def __init__(self, optimizer: FlatAdam) -> None:
        self._optimizer = optimizer
        self._programs: dict[tuple[object, ...], Callable[..., list[Tensor]]] = {}

    def __call__(
        self,
        losses: Losses,
        inputs: Inputs,
        lengths: Mapping[str, Length],
        *,
        max_norm: float | None = None,
    ) -> list[Tensor]:
        """Move the parameters one step down the loss; return the loss's other results.

        Args:
            losses: a scalar to go down on and other results, from the inputs, from parameters and
                buffers, and from nothing else; always the same function. Other results show a
                parameter as it was before the step only if the scalar depends on them, too.
            inputs: tensors [B, ...] and others, or lists of tensors, by name.
            lengths: of inputs whose length differs from call to call, and is at least 2.
            max_norm: norm that longer gradients are shortened to.
        """
        optimizer = self._optimizer
        # Between processes the gradient is averaged before anything moves along it.
        moves = optimizer.average is None
        shapes = tuple(
            (name, values.shape[1:] if name in lengths else values.shape)
            for name, values in flat_inputs(inputs)
        )
        key = (shapes, bool(lengths), max_norm, moves)
        moved = [optimizer.gradient, *(optimizer.next_move() if moves else ())]
        if key not in self._programs:
            copies = [tensor.clone() for tensor in moved]  # tracing computes, too
            self._programs[key] = self._compiled(losses, inputs, lengths, copies, max_norm)
        with torch.no_grad():
            results = self._programs[key]([tensor for _, tensor in flat_inputs(inputs)], *moved)
        if not moves:
            optimizer.step(max_norm=max_norm)
        return results

    def _compiled(
        self,
        losses: Losses,
        inputs: Inputs,
        lengths: Mapping[str, Length],
        moved: Sequence[Tensor],
        max_norm: float | None,
    ) -> Callable[..., list[Tensor]]:
        """Return the program for inputs of these shapes.

        It is called with the tensors of the inputs, and with those that it changes: the gradient,
        and if it also moves the parameters, the arguments of `adam_step`.
        """
        began = time.perf_counter()
        example, optimizer = self._example(inputs, lengths), self._optimizer
        parameters = [parameter for parameter, _ in optimizer.gradients]
        loss, _ = losses(with_tensors(inputs, iter(example)))
        # torch's own hints leave out that some are None
        gradients: Any = torch.autograd.grad(loss, parameters, allow_unused=True)
        used = [i for i, gradient in enumerate(gradients) if gradient is not None]
        places = [optimizer.gradients[i][1] for i in used]

        def step(values: list[Tensor], gradient: Tensor, *move: Tensor) -> list[Tensor]:
            loss, results = losses(with_tensors(inputs, iter(values)))
            parts = torch.autograd.grad(loss, [parameters[i] for i in used])
            gradient.copy_(_flat(parts, places, optimizer.flat.numel()))
            if move:
                adam_step(gradient, *move, max_norm=max_norm)
            return [result.detach() for result in results]

        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore", DeprecationWarning)  # torch warns of its own calls
            token = IS_TRACED.set(True)
            try:
                with torch.enable_grad():
                    traced = make_fx(
                        step,
                        tracing_mode="symbolic" if lengths else "real",
                        _allow_non_fake_inputs=True,  # parameters are no inputs
                    )(example, *moved)
            finally:
                IS_TRACED.reset(token)
            program = torch.compile(
                traced.forward,  # a module's call costs as much as a layer
                fullgraph=True,
                dynamic=bool(lengths),
                options={
                    # The key says all that could change; checking again costs as much as a layer.
                    "guard_filter_fn": torch.compiler.skip_all_guards_unsafe,
                    "compile_threads": 1,  # no processes that would outlive this one
                    "size_asserts": False,  # the key has the sizes of inputs
                    # The code that calls the compiled parts is C++, too, and not Python.
                    "cpp_wrapper": optimizer.gradient.device.type == "cpu",
                },
            )
            program(example, *moved)
        gc.collect()
        gc.freeze()  # or every later collection would walk what the compiler keeps
        spent = time.perf_counter() - began
        optimizer.compile_s += spent
        _log.info(
            "Compiled the gradient step for minibatches of %s%d rows in %.1f s.",
            "about " if lengths else "",
            len(example[0]),
            spent,
        )
        return program

    def _example(self, inputs: Inputs, lengths: Mapping[str, Length]) -> list[Tensor]:
        """Return tensors of usual lengths: a program must not depend on the first minibatch."""
        fixed = [
            values.shape[1:] if name in lengths else values.shape
            for name, values in flat_inputs(inputs)
        ]
        # Lengths that happen to be equal would be the same length to torch.
        parameters = self._optimizer.parameters
        shapes = [*fixed, *(tensor.shape for tensor in (*parameters, self._optimizer.flat))]
        used_lengths = {n for shape in shapes for n in shape}
        chosen: dict[Length, int] = {}
        for length in lengths.values():
            if length not in chosen:
                chosen[length] = next(
                    n for n in itertools.count(length.usual) if n not in used_lengths
                )
                used_lengths.add(chosen[length])
        return [
            values.new_zeros(chosen[lengths[name]], *values.shape[1:])
            if name in lengths
            else values
            for name, values in flat_inputs(inputs)
        ]


def _flat(gradients: Sequence[Tensor], places: Sequence[Tensor], n: int) -> Tensor:
    """Return the gradients at their places in a vector [n], 0 between them.

    A pair's place contains the places of its two parameters; where both are used, gradients add up.
    """
    starts = [place.storage_offset() for place in places]
    stops = [start + place.numel() for start, place in zip(starts, places, strict=True)]
    bounds = sorted({0, *starts, *stops, n})
    parts = []
    for low, high in itertools.pairwise(bounds):
        overlapping = [
            gradient.flatten()[low - start : high - start]
            for gradient, start, stop in zip(gradients, starts, stops, strict=True)
            if start <= low and high <= stop
        ]
        parts.append(
            functools.reduce(torch.add, overlapping)
            if overlapping
            else gradients[0].new_zeros(high - low)
        )
    return torch.cat(parts)
