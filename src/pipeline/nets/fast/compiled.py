"""`torch_settings.compile`: a loss, its derivative and Adam's step as one compiled program.

A quarter of a small network's gradient step is arithmetic; the rest is calls of torch and the graph
for `backward` (docs/explanation/fast-networks.md). So a step is traced once, into operations
without a graph, and torch's compiler turns these operations into one program; on the CPU the
program is in C++.
"""

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
    """Return the C++ compiler that torch uses on the CPU; None if it is not installed."""
    return shutil.which(os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++"))


def compile_steps(optimizers: Sequence[FlatAdam], networks: Iterable[nn.Module]) -> None:
    """Compile all later gradient steps of `networks`, if this is possible.

    If no compiler is installed, or a network has a HyperLayer, nothing is compiled, and a warning
    says so. Networks with memory are not compiled either, but without a warning.
    """
    if optimizers[0].flat.device.type == "cpu" and compiler() is None:
        _log.warning(
            "torch_settings.compile: no C++ compiler is installed here, so nothing is compiled. "
            "Install g++ or clang++, or name another compiler in the variable CXX."
        )
        return
    modules = [module for network in networks for module in network.modules()]
    if any(isinstance(module, HyperLayer) for module in modules):
        # The computation of a HyperLayer depends on the number of goals in a minibatch.
        _log.warning(
            "torch_settings.compile: networks with a goal signal and goal_conditioning_type "
            "hyper are not compiled."
        )
        return
    # Networks with memory are not compiled: minibatches of sequences differ in number of rows.
    if not any(isinstance(module, Memory) for module in modules):
        for optimizer in optimizers:
            optimizer.compiled = CompiledSteps(optimizer)


class CompiledSteps:
    """Makes an optimizer's steps on one loss, by a compiled program for each minibatch shape.

    Minibatches that differ only in the length of tensors use the same program. The same program on
    the same machine gives the same results, bit for bit. The results of torch's `backward` differ
    by rounding, because `backward` adds numbers in another order.
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
        """Make one step as `FlatAdam.descend` does, for lengths of at least 2.

        A result of `losses` that reads a parameter gets the parameter's value before the step only
        if the loss reads this parameter, too.
        """
        optimizer = self._optimizer
        # With several processes the program does not move the parameters, because the gradient must
        # be averaged first.
        moves = optimizer.average is None
        values = list(flat_inputs(inputs))
        shapes = tuple(
            (name, tensor.shape[1:] if name in lengths else tensor.shape) for name, tensor in values
        )
        # The key has everything that the traced operations depend on, because torch's own checks
        # are turned off.
        key = (shapes, bool(lengths), max_norm, moves)
        moved = [optimizer.gradient, *(optimizer.next_move() if moves else ())]
        if key not in self._programs:
            copies = [tensor.clone() for tensor in moved]  # tracing changes its inputs
            try:
                self._programs[key] = self._compiled(losses, inputs, lengths, copies, max_norm)
            except (RuntimeError, OSError, ImportError) as error:  # no Python.h, a full disk, ...
                reason = str(error).strip().partition("\n")[0]
                _log.warning("Gradient steps are not compiled from now on: %s", reason)
                if moves:
                    optimizer.take_back_move()
                optimizer.compiled = None
                return optimizer.descend(losses, inputs, max_norm=max_norm)
        with torch.no_grad():
            results = self._programs[key]([tensor for _, tensor in values], *moved)
        # Without `moves` the program wrote only the gradient, and `step` does the rest.
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
        """Return the compiled program for the shapes of `inputs`.

        The program's arguments are the tensors of the inputs and the tensors that it changes: the
        gradient and, if the program also changes the parameters, the arguments of `adam_step`.
        """
        began = time.perf_counter()
        example, optimizer = self._example(inputs, lengths), self._optimizer
        parameters = [parameter for parameter, _ in optimizer.gradients]
        loss, _ = losses(with_tensors(inputs, iter(example)))
        # The type is Any, because torch's type hints do not say that gradients may be None.
        gradients: Any = torch.autograd.grad(loss, parameters, allow_unused=True)
        # `step` cannot compute derivatives for parameters on which the loss does not depend.
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
            warnings.simplefilter("ignore", DeprecationWarning)  # torch's own calls cause these
            token = IS_TRACED.set(True)
            try:
                with torch.enable_grad():
                    traced = make_fx(
                        step,
                        tracing_mode="symbolic" if lengths else "real",
                        _allow_non_fake_inputs=True,  # for the parameters, which are not inputs
                    )(example, *moved)
            finally:
                IS_TRACED.reset(token)
            options: dict[str, Any] = {
                "compile_threads": 1,  # more would start processes that outlive this process
                "size_asserts": False,  # the key has the sizes of all inputs
                # On a CPU the calls of the compiled parts are also C++ instead of Python.
                "cpp_wrapper": optimizer.gradient.device.type == "cpu",
            }
            if lengths:
                # A guard takes as long as a layer, and the key has everything that can change.
                options["guard_filter_fn"] = torch.compiler.skip_all_guards_unsafe
                # Calling the module would take as long as a layer.
                program = torch.compile(
                    traced.forward, fullgraph=True, dynamic=True, options=options
                )
            else:
                program = _inner_program(traced, [*example, *moved], options)
            # The first call compiles, and changes only copies of the optimizer's tensors.
            program(example, *moved)
        gc.collect()
        gc.freeze()  # otherwise every later collection would visit the compiler's objects
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
        """Return example inputs of usual lengths, with which a program is compiled.

        The first minibatch is not used as the example, because the program must not depend on the
        lengths of that minibatch.
        """
        fixed = [
            values.shape[1:] if name in lengths else values.shape
            for name, values in flat_inputs(inputs)
        ]
        # The lengths of the example must differ, because torch would take lengths that are equal by
        # chance for one length.
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


def _inner_program(
    traced: torch.fx.GraphModule, example: Sequence[Tensor], options: Mapping[str, Any]
) -> Callable[..., list[Tensor]]:
    """Return the compiled code of a traced program, without the wrappers of `torch.compile`."""
    # The wrappers would take half as long as a small network's step.
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    # Parameters become arguments, because torch would treat them as constants.
    graph, arguments, read = traced.graph, dict[str, torch.fx.Node](), list[Tensor]()
    first = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first):
        for name in dict.fromkeys(node.target for node in graph.nodes if node.op == "get_attr"):
            arguments[name] = graph.placeholder(f"read_{name}")
            read.append(getattr(traced, name).detach())
            delattr(traced, name)
    for node in list(graph.nodes):
        node.meta.clear()  # shapes of the first trace, in another form than the compiler's
        if node.op == "get_attr":
            node.replace_all_uses_with(arguments[node.target])
            graph.erase_node(node)
    graph.set_codegen(torch.fx.graph.CodeGen())  # one argument for each tensor
    traced.recompile()
    inner: list[Any] = []

    def compiled(*arguments: Any, **keywords: Any) -> Any:
        inner.append(compile_fx_inner(*arguments, **keywords))
        return inner[-1]

    # From torch's cache of whole programs `compiled` would not be called.
    with config.patch(enable_autograd_cache=False):
        compile_fx(traced, [*example, *read], inner_compile=compiled, config_patches=dict(options))
    run = inner[0].current_callable
    return lambda values, *moved: run([*values, *moved, *read])


def _flat(gradients: Sequence[Tensor], places: Sequence[Tensor], n: int) -> Tensor:
    """Return the gradients at their places in a vector [n], with 0 between places.

    The place of a pair contains the places of its two parameters. If a loss uses the pair and the
    parameters, their gradients are added.
    """
    starts = [place.storage_offset() for place in places]
    stops = [start + place.numel() for start, place in zip(starts, places, strict=True)]
    # Between two successive bounds, the set of overlapping gradients does not change.
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
