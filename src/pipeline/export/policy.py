"""Acting with an exported policy as Unity's engine does: masks, memories, batches.

`rows_of` and the functions below it convert observations of Gymnasium into the inputs of a policy.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline import seeding
from pipeline.core.specs import ActionTuple
from pipeline.core.steps import DecisionSteps
from pipeline.errors import ExportError, brief
from pipeline.export.contract import NEWEST_VERSION, OLDEST_VERSION, model_findings
from pipeline.export.layout import ModelDescription, describe, load

if TYPE_CHECKING:
    import onnx

    from pipeline.core.arrays import AnyArray, BoolArray, FloatArray

_MASKS = ("action_mask", "mask")
# Largest distance of a scaled number from 0..1 that counts as rounding.
_ROUNDING = 1e-5
# Values of a pixel that 0 and 1 stand for in most images.
_BYTES = (0.0, 255.0)
_NUMBER = r"(-?\d+\.?\d*(?:e[-+]\d+)?)"
_RANDOM_OPERATORS = ("Multinomial", "RandomNormalLike", "RandomNormal", "RandomUniform")
# The attribute `seed` is a float32, which represents every whole number up to 2**24.
_LARGEST_EXACT_SEED = 1 << 24


class OnnxPolicy:
    """A policy in ONNX, run on one thread with ONNX Runtime.

    Each agent's memory is kept between decisions, and dropped by `end`. Two policies with the same
    file and seed give the same actions for the same steps.

    A model of package 1.x (version 2) returns log-probabilities of discrete actions; the actions
    are then drawn here, as that package does.

    Attributes:
        description: the model's declarations.
        has_deterministic_actions: whether the model also has deterministic actions.
    """

    def __init__(self, source: onnx.ModelProto | Path | str, *, seed: int = 0) -> None:
        """Load a model; `seed` is the seed of sampled actions.

        Raises:
            ExportError: The file cannot be read or run, or is not of version 2 or 3.
        """
        self._model = load(source)
        self._name = "the model" if hasattr(source, "graph") else str(source)
        self.description: ModelDescription = describe(self._model)
        self._is_old = self.description.version == OLDEST_VERSION
        if not self._is_old and self.description.version != NEWEST_VERSION:
            raise ExportError(
                f"{self._name}: version_number is {self.description.version}, only models of "
                f"version {OLDEST_VERSION} and {NEWEST_VERSION} can be run here; export the policy "
                "again"
            )
        findings = model_findings(self._model)
        if findings:
            raise ExportError(f"{self._name}: {'; '.join(map(str, findings))}")
        outputs = self.description.outputs
        self.has_deterministic_actions: bool = not self._is_old and all(
            f"deterministic_{name}" in outputs for name in self._output_names(deterministic=False)
        )
        self._memories: dict[int, FloatArray] = {}
        self.reset(seed)

    def reset(self, seed: int) -> None:
        """Forget every agent's memory, and restart the random numbers from `seed`."""
        # Seeds are attributes of the graph's nodes, so another seed needs another session.
        self._memories.clear()
        self._session = create_session(self._model, seed)
        self._draws = seeding.stream(seed, "onnx", "choices")

    def act(self, steps: DecisionSteps, deterministic: bool = False) -> ActionTuple:
        """Return the actions of the agents in `steps`, in their order.

        Raises:
            ExportError: The model lacks deterministic actions, or the observations do not fit it.
        """
        expected = self._output_names(deterministic)
        # Not every operator accepts an empty batch.
        if len(steps) == 0:
            return self._actions({}, 0)
        feeds = self._observations(steps.obs)
        if "action_masks" in self.description.inputs:
            feeds["action_masks"] = self._allowed(steps.action_mask, len(steps))
        agents = steps.agent_id.tolist()
        if self.description.memory_size:
            feeds["recurrent_in"] = self._recall(agents)
            expected = [*expected, "recurrent_out"]
        try:
            values = self._session.run(expected, feeds)
        except Exception as error:
            reason = str(error).strip().splitlines()[0]
            raise ExportError(f"{self._name}: ONNX Runtime cannot run it: {reason}") from error
        only = "continuous_actions" if self.description.continuous_size else "discrete_actions"
        names = [only if name == "action" else name for name in expected]
        result = dict(zip(names, values, strict=True))
        self._refuse_nonsense(result, len(steps))
        if self.description.memory_size:
            # After the check of the outputs, so that no unusable memory is kept.
            self._memories.update(zip(agents, result["recurrent_out"], strict=True))
        if self._is_old and "discrete_actions" in result:
            choices = self._drawn(result["discrete_actions"], steps.action_mask)
            result["discrete_actions"] = choices
        return self._actions(result, len(steps))

    def end(self, agent_ids: Iterable[int]) -> None:
        """Drop the memories of agents after the end of their episodes."""
        for agent in agent_ids:
            self._memories.pop(agent, None)

    def _output_names(self, deterministic: bool) -> list[str]:
        names = []
        if self.description.continuous_size:
            names.append("continuous_actions")
        if self.description.discrete_branches:
            names.append("discrete_actions")
        # With one kind of action, old files repeat its output as `action`. Some files have only
        # `action`, or an output with a branch less.
        if self._is_old and len(names) == 1 and "action" in self.description.outputs:
            names = ["action"]
        if not deterministic:
            return names
        names = [f"deterministic_{name}" for name in names]
        missing = [name for name in names if name not in self.description.outputs]
        if missing:
            raise ExportError(
                f"{self._name}: has no output {missing[0]}; it was exported without deterministic "
                "actions, so act with deterministic=False or export it again"
            )
        return names

    def _observations(self, obs: Sequence[FloatArray]) -> dict[str, AnyArray]:
        sent = _in_old_layout(obs) if self._is_old else {f"obs_{k}": o for k, o in enumerate(obs)}
        feeds: dict[str, AnyArray] = {}
        for name, info in self.description.inputs.items():
            if name in ("action_masks", "recurrent_in"):
                continue
            shape = sent[name].shape[1:] if name in sent else None
            if shape != info.shape[1:]:
                sizes = [size for size in info.shape[1:] if isinstance(size, int)]
                cause = (
                    "a sensor with another name may have another place: sensors are in the order "
                    "of their names"
                )
                if shape is not None and math.prod(shape) == math.prod(sizes):
                    cause = (
                        "one has a picture where the other has a vector: see the option `visual` "
                        "of `pipeline env build`"
                    )
                raise ExportError(
                    f"{self._name}: input {name} wants shape {list(info.shape[1:])}, the behavior "
                    f"sends {'nothing' if shape is None else list(shape)}; use the model that was "
                    f"trained on this behavior ({cause})"
                )
            # ONNX Runtime takes contiguous arrays of the declared type only.
            feeds[name] = np.ascontiguousarray(sent[name], dtype=np.float32)
        return feeds

    def _drawn(self, log_probs: FloatArray, mask: list[BoolArray] | None) -> AnyArray:
        """Return int [N, branches]: choices drawn from the outputs [N, M] of an old model."""
        if mask is None:
            raise ExportError(
                f"{self._name}: the file has only the sum of its branches' sizes; give the "
                "action_mask, which has a part for each branch"
            )
        # Gumbel-max trick: the argmax of logits plus Gumbel noise is a sample of the softmax.
        noisy = log_probs + self._draws.gumbel(size=log_probs.shape)
        allowed = np.where(np.concatenate(mask, axis=1), -np.inf, noisy)
        ends = np.cumsum([part.shape[1] for part in mask])[:-1]
        return np.stack([part.argmax(axis=1) for part in np.split(allowed, ends, axis=1)], axis=1)

    def _allowed(self, mask: list[BoolArray] | None, n_agents: int) -> FloatArray:
        """Return masks for the model (1 = allowed) from an environment's (True = forbidden)."""
        size = sum(self.description.discrete_branches)
        if mask is None:
            return np.ones((n_agents, size), dtype=np.float32)
        return np.logical_not(np.concatenate(mask, axis=1)).astype(np.float32)

    def _recall(self, agents: list[int]) -> FloatArray:
        """Return float32 [N, 1, memory]: each agent's memory, zeros for a new agent."""
        # Collected in each call, because agents and their order differ between calls.
        memory = np.zeros((len(agents), 1, self.description.memory_size), dtype=np.float32)
        for row, agent in enumerate(agents):
            if agent in self._memories:
                memory[row] = self._memories[agent]
        return memory

    def _refuse_nonsense(self, result: dict[str, AnyArray], n_agents: int) -> None:
        """Refuse actions and memories of a wrong shape, not finite, or outside the branches."""
        sizes = self.description.discrete_branches
        widths = {
            "continuous_actions": (self.description.continuous_size,),
            "discrete_actions": (sum(sizes) if self._is_old else len(sizes),),
            "recurrent_out": (1, self.description.memory_size),
        }
        for name, values in result.items():
            shape = (n_agents, *widths[name.removeprefix("deterministic_")])
            if values.shape != shape:
                flaw = f"has shape {list(values.shape)}, not {list(shape)}"
            elif not np.isfinite(values).all():
                flaw = "has values that are not finite"
            elif self._is_old or not name.endswith("discrete_actions"):
                continue
            elif not ((values >= 0) & (values < sizes)).all():
                flaw = f"has choices outside the branches {list(sizes)}"
            else:
                continue
            raise ExportError(f"{self._name}: the output {name} {flaw}; export the policy again")

    def _actions(self, result: dict[str, AnyArray], n_agents: int) -> ActionTuple:
        sizes = {
            "continuous": self.description.continuous_size,
            "discrete": len(self.description.discrete_branches),
        }
        parts = {kind: np.zeros((n_agents, size)) for kind, size in sizes.items()}
        for name, values in result.items():
            if name.endswith("_actions"):
                parts["discrete" if "discrete" in name else "continuous"] = values
        return ActionTuple(parts["continuous"], parts["discrete"])


def _in_old_layout(obs: Sequence[FloatArray]) -> dict[str, FloatArray]:
    """Return observations by the input names of version 2, which has one input for all vectors."""
    vectors = [array for array in obs if array.ndim == 2]
    images = [array for array in obs if array.ndim == 4]
    sent = {f"obs_{index}": array for index, array in enumerate(obs) if array.ndim == 3}
    sent |= {f"visual_observation_{index}": array for index, array in enumerate(images)}
    return sent | ({"vector_observation": np.concatenate(vectors, axis=1)} if vectors else {})


def create_session(model: onnx.ModelProto, seed: int, extra_outputs: Sequence[str] = ()) -> Any:
    """Return an ONNX Runtime session on one thread, with a seed for every random operator.

    ONNX Runtime seeds random operators from one number of the process, unless an operator has the
    attribute `seed`; so a copy of the model gets an attribute for each. `extra_outputs` has names
    of float tensors inside the graph to return too.

    Raises:
        ExportError: ONNX Runtime refuses the model.
    """
    import onnxruntime
    from onnx import ModelProto, TensorProto, helper

    copy = ModelProto()
    # A copy, because the seeds must not be in a model that is published later.
    copy.CopyFrom(model)
    for index, node in enumerate(copy.graph.node):
        if node.op_type in _RANDOM_OPERATORS:
            attributes = [attribute for attribute in node.attribute if attribute.name != "seed"]
            # A different seed for each node, or two branches would draw the same numbers.
            node_seed = seeding.derive(seed, "onnx", index) % _LARGEST_EXACT_SEED
            del node.attribute[:]
            node.attribute.extend([*attributes, helper.make_attribute("seed", float(node_seed))])
    for name in extra_outputs:
        copy.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
    options = onnxruntime.SessionOptions()
    # One thread gives one order of additions, and small networks are not faster with more.
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.log_severity_level = 4  # only fatal: exceptions have the other messages
    try:
        return onnxruntime.InferenceSession(
            copy.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
    except Exception as error:
        reason = str(error).strip().splitlines()[0]
        raise ExportError(f"ONNX Runtime refuses the model: {reason}") from error


def take_mask(observation: Any, layout: ModelDescription) -> tuple[Any, Any]:
    """Return an observation without the action mask in it, and the mask or None."""
    for key in _MASKS if isinstance(observation, Mapping) and layout.discrete_branches else ():
        if key in observation and _text_of(key, layout.meanings) is None:
            return {k: part for k, part in observation.items() if k != key}, observation[key]
    return observation, None


def forbidden(mask: Any, n_agents: int, branches: Sequence[int], where: str) -> list[BoolArray]:
    """Return bool [N, branch size] by branch, True = forbidden.

    `mask` has this form, or Gymnasium's: whole numbers, 1 = allowed, in one array or in one array
    for each branch.

    Raises:
        ExportError: The mask has another size.
    """
    parts = [mask] if isinstance(mask, np.ndarray) else [np.asarray(part) for part in mask]
    try:
        flat = np.concatenate([part.reshape(n_agents, -1) for part in parts], axis=1)
    except ValueError:
        flat = np.empty((n_agents, 0), bool)
    # A single bool array is ambiguous: True could mean allowed or forbidden.
    is_plain_bool = isinstance(mask, np.ndarray) and mask.dtype == bool
    if flat.shape[1] != sum(branches) or is_plain_bool:
        raise ExportError(
            f"{where}: the action mask does not fit; give bool [N, size] for each branch of the "
            f"sizes {list(branches)}, True where forbidden, or Gymnasium's mask of whole numbers, "
            f"{sum(branches)} for each agent, 1 where allowed"
        )
    # Gymnasium's numbers: 1 is allowed, so 0 is forbidden.
    if flat.dtype != bool:
        flat = flat == 0
    return np.split(flat, np.cumsum(branches)[:-1], axis=1)


def rows_of(observation: Any, layout: ModelDescription, where: str) -> list[FloatArray]:
    """Return float32 [N, *shape] for each input `obs_0`, `obs_1`, ... of a policy.

    Args:
        observation: observation of an environment, or of vectorized environments: numbers, an
            image, or a Dict or Tuple of these with the file's names; or a list of arrays, one for
            each input. Floats [N, *shape] are used as the network's inputs without changes.
        layout: declarations of the policy.
        where: name of the policy in messages.

    Raises:
        ExportError: The observation has another form, or its scale is not in the file.
    """
    if layout.version == OLDEST_VERSION:
        return _of_old_layout(observation, where)
    names = [f"obs_{index}" for index in range(len(layout.inputs))]
    shapes = {name: layout.inputs[name].shape[1:] for name in names if name in layout.inputs}
    arrays = []
    for (name, shape), part in zip(
        shapes.items(), _parts(observation, list(shapes), layout.meanings, where), strict=True
    ):
        text = layout.meanings.get(name, "")
        array = np.asarray(part)
        rows = _rows(array, shape, text) if array.dtype.kind in "fiub" else None
        if rows is None:
            given = f"{array.dtype} {list(array.shape)}"
            if array.dtype.kind in "fiub" and array.size:
                given += f" from {array.min():g} to {array.max():g}"
            raise ExportError(
                f"{where}: {name} ({_name(text)}) is {given}; give {_expected(shape, text)}"
            )
        arrays.append(rows)
    if len(set(map(len, arrays))) > 1:
        raise ExportError(f"{where}: the observations are of {[*map(len, arrays)]} agents")
    return arrays


def _of_old_layout(observation: Any, where: str) -> list[FloatArray]:
    """Return the inputs of a file of package 1.x, which has no descriptions of its sensors."""
    given = observation if isinstance(observation, list | tuple) else [observation]
    arrays = list(map(np.asarray, given))
    if any(array.ndim < 2 or (array.ndim > 2 and array.dtype.kind != "f") for array in arrays):
        raise ExportError(
            f"{where}: a file of package 1.x does not name its sensors; give a list of arrays "
            "[N, *shape] in the environment's order, images channels first as floats from 0 to 1"
        )
    return arrays


def _parts(
    observation: Any, inputs: list[str], meanings: Mapping[str, str], where: str
) -> Sequence[Any]:
    """Return the part of an observation for each input."""
    if isinstance(observation, Mapping | tuple):
        leaves = dict(_leaves(observation))
        if len(leaves) == len(inputs) == 1:
            return list(leaves.values())
        by_input = {_text_of(name, meanings): part for name, part in leaves.items()}
        if set(by_input) == set(inputs):
            return [by_input[name] for name in inputs]
        if isinstance(observation, Mapping):
            known = ", ".join(_name(meanings.get(name, "")) for name in inputs)
            raise ExportError(
                f"{where}: the observation has the parts {brief(', '.join(leaves))}, the file has "
                f"{known}; give these, or a list of arrays [N, *shape] in the order of the file"
            )
    if isinstance(observation, list | tuple) and len(observation) == len(inputs):
        return observation
    if len(inputs) == 1:
        return [observation]
    n_given = len(observation) if isinstance(observation, list | tuple) else 1
    raise ExportError(f"{where}: needs {len(inputs)} observations, not {n_given}")


def _leaves(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping | tuple):
        for key, part in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
            yield from _leaves(part, (*path, str(key)))
    else:
        yield "/".join(path), tree


def _text_of(name: str, meanings: Mapping[str, str]) -> str | None:
    """Return the tensor with a sensor's name in its meaning, or None."""
    for tensor, text in meanings.items():
        if f"{text}; ".startswith(f"{brief(name)}; "):
            return tensor
    return None


def _name(text: str) -> str:
    return text.partition("; ")[0] or "without a name"


def _bounds(text: str) -> tuple[float, float] | None:
    """Return the pixel values that 0 and 1 stand for in a scaled image; None if not scaled."""
    found = re.search(f"; 0 to 1 stand for {_NUMBER} to {_NUMBER}$", text)
    return None if found is None else (float(found[1]), float(found[2]))


def _ranges(text: str) -> AnyArray:
    """Return int64 [parts, 2]: first and last value of each one-hot part."""
    _, _, ranges = text.partition("; one-hot of ")
    pairs = re.findall(r"(-?\d{1,18}) to (-?\d{1,18})", ranges)
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)


def _expected(shape: Any, text: str) -> str:
    network = f"float32 {['N', *shape]}".replace("'", "")
    if len(shape) == 3:
        network += ", channels first, from 0 to 1"
        bounds, (channels, height, width) = _bounds(text), shape
        if bounds is not None:
            kind = "whole " if bounds == _BYTES else ""
            return (
                f"an image [{height}, {width}, {channels}] of {kind}numbers from {bounds[0]:g} to "
                f"{bounds[1]:g}, or {network}"
            )
    elif bounds := _bounds(text):
        return f"whole numbers from {bounds[0]:g} to {bounds[1]:g}, or {network}"
    elif len(_ranges(text)):
        return f"whole numbers ({text.partition('; one-hot of ')[2]}), or {network}"
    return network


def _rows(array: AnyArray, shape: Any, text: str) -> FloatArray | None:
    """Return float32 [N, *shape]; None if the array has another form."""
    if len(shape) == 3:
        return _images(array, shape, text)
    if array.dtype.kind in "iu" and len(ranges := _ranges(text)):
        return _one_hot(array, shape[0], ranges)
    if bounds := _bounds(text):  # a small image that is a vector
        is_float = array.dtype.kind == "f"
        if is_float and shape not in (array.shape, array.shape[1:]):
            return None  # ambiguous: the values may have been divided by 255 or not
        scaled = _scaled(array, (0.0, 1.0) if is_float else bounds)
        if scaled is None:
            return None
        array = scaled
    # The numbers of one agent in any shape, or of several environments.
    n_rows = _n_rows(array, math.prod(shape))
    # A vector of eight numbers is not taken for eight agents with one number each.
    if n_rows is None or (array.ndim == 1 and n_rows > 1):
        return None
    return array.astype(np.float32).reshape(n_rows, *shape)


def _n_rows(array: AnyArray, size: int) -> int | None:
    """Return the number of agents with `size` numbers each in an array; None if it does not fit."""
    if array.size == size:
        return 1
    return len(array) if array.ndim and math.prod(array.shape[1:]) == size else None


def _images(array: AnyArray, shape: Any, text: str) -> FloatArray | None:
    channels, height, width = shape
    is_float, bounds = array.dtype.kind == "f", _bounds(text)
    if bounds is None:
        # The file does not say that values are from 0 to 1: a player's own sensor may send others.
        is_right = is_float and shape in (array.shape, array.shape[1:])
        return array.astype(np.float32).reshape(-1, *shape) if is_right else None
    # Already the network's input: floats, channels first, with a batch axis.
    is_networks = is_float and array.shape[1:] == shape
    if channels == 1 and array.shape[-2:] == (height, width):
        array = array.reshape(-1, *shape)
    if is_networks:
        images, bounds = array, (0.0, 1.0)
    elif is_float and bounds == _BYTES:
        return None  # ambiguous: the values may have been divided by 255 or not
    elif array.ndim in (3, 4) and array.shape[-3:] == (height, width, channels):
        images = np.moveaxis(array, -1, -3)
    elif array.ndim in (3, 4) and array.shape[-3:] == shape:
        images = array
    else:
        return None
    scaled = _scaled(images, bounds)
    return None if scaled is None else scaled.reshape(-1, *shape)


def _scaled(numbers: AnyArray, bounds: tuple[float, float]) -> FloatArray | None:
    """Return float32 numbers scaled to 0 to 1 as the bridge does; None if any is outside."""
    low, high = np.float32(bounds[0]), np.float32(bounds[1])
    scaled: FloatArray = np.subtract(numbers, low).astype(np.float32) / (high - low)
    is_inside = scaled.min(initial=0) >= -_ROUNDING and scaled.max(initial=0) <= 1 + _ROUNDING
    return scaled if is_inside else None


def _one_hot(array: AnyArray, size: int, ranges: AnyArray) -> FloatArray | None:
    first, last = ranges.T
    sizes = last - first + 1
    if sizes.sum() != size or _n_rows(array, len(ranges)) is None:
        return None
    values = array.reshape(-1, len(ranges)).astype(np.int64)
    if ((values < first) | (values > last)).any():
        return None
    result = np.zeros((len(values), size), dtype=np.float32)
    # First column of each part, plus the value's place in its part.
    np.put_along_axis(result, values - first + np.cumsum(sizes) - sizes, 1.0, axis=1)
    return result
