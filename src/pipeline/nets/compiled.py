"""`torch_settings.compile`: a loss and its derivative as one compiled program.

A small network is bound by calls: a quarter of a gradient step is arithmetic, and the rest is calls
of torch and the graph that it keeps for `backward`. So the loss and its derivative are traced once,
into operations without a graph, and torch's compiler makes few programs of those.
"""

from __future__ import annotations

import gc
import itertools
import logging
import os
import shutil
import sys
import time
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from pipeline.nets.layers import IS_TRACED

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor, nn

    from pipeline.data.columns import Length

    Losses = Callable[[Mapping[str, Tensor]], tuple[Tensor, tuple[Tensor, ...]]]

_log = logging.getLogger(__name__)


def compiler() -> str | None:
    """The C++ compiler that torch would use on the CPU; None where it is not installed."""
    return shutil.which(os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++"))


class CompiledGradients:
    """Derivatives of one loss by some parameters, in a program for each shape of minibatch.

    Where lengths differ from minibatch to minibatch, one program takes any of them. The same
    program on the same machine gives the same bytes; against `backward` sums are in another order.

    Args:
        gradients: the parameters and where their gradients lie.
    """

    def __init__(self, gradients: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
        self._gradients = list(gradients)
        self._programs: dict[
            tuple[object, ...], tuple[Callable[..., list[Tensor]], list[Tensor]]
        ] = {}

    def __call__(
        self,
        losses: Losses,
        columns: Mapping[str, Tensor],
        lengths: Mapping[str, Length] | None = None,
    ) -> list[Tensor]:
        """Add the gradients of parameters that the loss depends on; the loss's other results.

        Args:
            losses: a scalar to go down on and other results, from the columns, from parameters and
                buffers, and from nothing else; always the same function.
            columns: [B, ...] and others, by name.
            lengths: of columns whose length differs from call to call, and is at least 2.
        """
        lengths = lengths or {}
        shapes = tuple(
            (name, values.shape[1:] if name in lengths else values.shape)
            for name, values in columns.items()
        )
        key = (shapes, bool(lengths))
        if key not in self._programs:
            self._programs[key] = self._compiled(losses, columns, lengths)
        program, places = self._programs[key]
        with torch.no_grad():
            return program(list(columns.values()), places)

    def _compiled(
        self, losses: Losses, columns: Mapping[str, Tensor], lengths: Mapping[str, Length]
    ) -> tuple[Callable[..., list[Tensor]], list[Tensor]]:
        """The program for columns of these shapes, and the gradients that it adds to."""
        began = time.perf_counter()
        columns = self._example(columns, lengths)
        names = list(columns)
        parameters = [parameter for parameter, _ in self._gradients]
        loss, _ = losses(columns)
        # torch's own hints leave out that some are None
        gradients: Any = torch.autograd.grad(loss, parameters, allow_unused=True)
        used = [i for i, gradient in enumerate(gradients) if gradient is not None]

        def derivative(values: list[Tensor], places: list[Tensor]) -> list[Tensor]:
            loss, results = losses(dict(zip(names, values, strict=True)))
            gradients = torch.autograd.grad(loss, [parameters[i] for i in used])
            for place, gradient in zip(places, gradients, strict=True):
                place.add_(gradient)  # a pair's and that of one of it may be the same memory
            return [one.detach() for one in results]

        places = [self._gradients[i][1] for i in used]
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore", DeprecationWarning)  # of parts of torch by others of it
            again = IS_TRACED.set(True)
            try:
                with torch.enable_grad():
                    traced = make_fx(
                        derivative,
                        tracing_mode="symbolic" if lengths else "real",
                        _allow_non_fake_inputs=True,  # parameters are no inputs
                    )(list(columns.values()), places)
            finally:
                IS_TRACED.reset(again)
            program = torch.compile(
                traced,
                fullgraph=True,
                dynamic=bool(lengths),
                options={
                    # The key says all that could change; checking again costs as much as a layer.
                    "guard_filter_fn": torch.compiler.skip_all_guards_unsafe,
                    "compile_threads": 1,  # no processes that would outlive this one
                    "size_asserts": False,  # of inputs, which the key has seen
                },
            )
            program(list(columns.values()), places)
            for place in places:  # tracing has computed, too
                place.zero_()
        gc.collect()
        gc.freeze()  # or every later collection would walk what the compiler keeps
        _log.info(
            "Compiled the gradient step for minibatches of %s%d rows in %.1f s.",
            "about " if lengths else "",
            len(next(iter(columns.values()))),
            time.perf_counter() - began,
        )
        return program, places

    def _example(
        self, columns: Mapping[str, Tensor], lengths: Mapping[str, Length]
    ) -> dict[str, Tensor]:
        """Columns with their usual lengths: a program must not depend on which came first."""
        fixed = [
            values.shape[1:] if name in lengths else values.shape
            for name, values in columns.items()
        ]
        # Lengths that happen to be equal would be the same length to torch.
        taken = {
            n for shape in (*fixed, *(place.shape for _, place in self._gradients)) for n in shape
        }
        chosen: dict[Length, int] = {}
        for length in lengths.values():
            if length not in chosen:
                chosen[length] = next(n for n in itertools.count(length.usual) if n not in taken)
                taken.add(chosen[length])
        return {
            name: values.new_zeros(chosen[lengths[name]], *values.shape[1:])
            if name in lengths
            else values
            for name, values in columns.items()
        }
