"""Acting with an exported policy as Unity's engine does, with masks, memories and batches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline import seeding
from pipeline.core.arrays import AnyArray, BoolArray, FloatArray
from pipeline.core.specs import ActionTuple
from pipeline.core.steps import DecisionSteps
from pipeline.errors import ExportError
from pipeline.export.contract import NEWEST_VERSION, OLDEST_VERSION, model_findings
from pipeline.export.layout import ModelDescription, describe, load

if TYPE_CHECKING:
    import onnx

_RANDOM_OPERATORS = ("Multinomial", "RandomNormalLike", "RandomNormal", "RandomUniform")
# The attribute `seed` is a float32, which represents every whole number up to 2**24.
_LARGEST_EXACT_SEED = 1 << 24


class OnnxPolicy:
    """A policy in ONNX, run on one thread with ONNX Runtime.

    Each agent's memory is kept between decisions, and deleted by `end`. Two policies with the same
    file and seed give the same actions for the same steps.

    A model of package 1.x (version 2) returns log-probabilities of discrete actions, from which
    this class draws the actions, as that package does.

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
                f"{self._name}: version_number is {self.description.version}, but only models of "
                f"the versions {OLDEST_VERSION} and {NEWEST_VERSION} can be run; export the policy "
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

    def act(self, steps: DecisionSteps, deterministic: bool = True) -> ActionTuple:
        """Return the actions of the agents in `steps`, in their order.

        Raises:
            ExportError: The model lacks deterministic actions, or the observations do not fit it.
        """
        expected = self._output_names(deterministic)
        # The model does not run for an empty batch, because not every operator accepts one.
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
            # Memories are kept only after the check of the outputs, so that all of them are usable.
            self._memories.update(zip(agents, result["recurrent_out"], strict=True))
        if self._is_old and "discrete_actions" in result:
            choices = self._drawn(result["discrete_actions"], steps.action_mask)
            result["discrete_actions"] = choices
        return self._actions(result, len(steps))

    def end(self, agent_ids: Iterable[int] | None = None) -> None:
        """Delete the memories of agents when their episodes have ended; None for all agents."""
        for agent in list(self._memories) if agent_ids is None else agent_ids:
            self._memories.pop(agent, None)

    def _output_names(self, deterministic: bool) -> list[str]:
        names = ["continuous_actions"] if self.description.continuous_size else []
        names += ["discrete_actions"] if self.description.discrete_branches else []
        # Old files with one kind of action have an output `action`. It is read, because the output
        # that is named by the kind may be missing, or may have one branch too few.
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
                        "the model or the behavior has a picture where the other has a vector: see "
                        "the option `visual` of `pipeline env build`"
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
                f"{self._name}: the file does not have the sizes of the branches, only their sum; "
                "give the action_mask, which has a part for each branch"
            )
        # This is the Gumbel-max trick: the argmax of logits plus Gumbel noise is a sample of the
        # softmax.
        noisy = log_probs + self._draws.gumbel(size=log_probs.shape)
        allowed = np.where(np.concatenate(mask, axis=1), -np.inf, noisy)
        ends = np.cumsum([part.shape[1] for part in mask])[:-1]
        return np.stack([part.argmax(axis=1) for part in np.split(allowed, ends, axis=1)], axis=1)

    def _allowed(self, mask: list[BoolArray] | None, n_agents: int) -> FloatArray:
        """Return the model's masks (1 = allowed) from environment masks (True = forbidden)."""
        size = sum(self.description.discrete_branches)
        if mask is None:
            return np.ones((n_agents, size), dtype=np.float32)
        return np.logical_not(np.concatenate(mask, axis=1)).astype(np.float32)

    def _recall(self, agents: list[int]) -> FloatArray:
        """Return float32 [N, 1, memory]: each agent's memory, zeros for a new agent."""
        # Agents and their order differ between calls, so each call collects the memories.
        memory = np.zeros((len(agents), 1, self.description.memory_size), dtype=np.float32)
        for row, agent in enumerate(agents):
            if agent in self._memories:
                memory[row] = self._memories[agent]
        return memory

    def _refuse_nonsense(self, result: dict[str, AnyArray], n_agents: int) -> None:
        """Refuse actions and memories with a wrong shape, non-finite numbers or unknown choices."""
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
        by_kind = {name.removeprefix("deterministic_"): array for name, array in result.items()}
        sizes = self.description.continuous_size, len(self.description.discrete_branches)
        names = ("continuous_actions", "discrete_actions")
        return ActionTuple(
            *(by_kind.get(k, np.zeros((n_agents, n))) for k, n in zip(names, sizes, strict=True))
        )


def _in_old_layout(obs: Sequence[FloatArray]) -> dict[str, FloatArray]:
    """Return observations by the input names of version 2, which has one input for all vectors."""
    vectors = [array for array in obs if array.ndim == 2]
    images = [array for array in obs if array.ndim == 4]
    sent = {f"obs_{index}": array for index, array in enumerate(obs) if array.ndim == 3}
    sent |= {f"visual_observation_{index}": array for index, array in enumerate(images)}
    return sent | ({"vector_observation": np.concatenate(vectors, axis=1)} if vectors else {})


def create_session(model: onnx.ModelProto, seed: int, extra_outputs: Sequence[str] = ()) -> Any:
    """Return an ONNX Runtime session on one thread, with a seed for every random operator.

    A random operator without the attribute `seed` would take its seed from a number that belongs to
    the whole process, so the session runs a copy of the model in which each random operator has
    this attribute. `extra_outputs` names float tensors inside the graph that become outputs too.

    Raises:
        ExportError: ONNX Runtime refuses the model.
    """
    import onnxruntime
    from onnx import ModelProto, TensorProto, helper

    copy = ModelProto()
    # The seeds are in a copy, because a published model must not have them.
    copy.CopyFrom(model)
    for index, node in enumerate(copy.graph.node):
        if node.op_type in _RANDOM_OPERATORS:
            attributes = [attribute for attribute in node.attribute if attribute.name != "seed"]
            # With equal seeds, the nodes of two branches would draw the same numbers.
            node_seed = seeding.derive(seed, "onnx", index) % _LARGEST_EXACT_SEED
            del node.attribute[:]
            node.attribute.extend([*attributes, helper.make_attribute("seed", float(node_seed))])
    for name in extra_outputs:
        copy.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
    options = onnxruntime.SessionOptions()
    # One thread always adds in the same order; small networks gain nothing from more threads.
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.log_severity_level = 4  # only fatal errors: other messages are in the exceptions
    try:
        return onnxruntime.InferenceSession(
            copy.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
    except Exception as error:
        reason = str(error).strip().splitlines()[0]
        raise ExportError(f"ONNX Runtime refuses the model: {reason}") from error
