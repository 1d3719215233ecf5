"""The part of the graph that turns body features into actions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pipeline.export.description import Dense

if TYPE_CHECKING:
    from pipeline.export.builder import GraphBuilder
    from pipeline.export.description import ContinuousHead

ACTION_BOUND = 3.0
LOG_SIGMA_MIN, LOG_SIGMA_MAX = -20.0, 2.0
_FORBIDDEN = 1e8
_FLOAT, _INT64 = 1, 7


def continuous_head(builder: GraphBuilder, body: str, size: int, head: ContinuousHead) -> None:
    """Add `continuous_actions`, their shape constant and the deterministic ones."""
    mu, n = builder.dense(body, size, head.mu, "mu")
    noise = builder.node("RandomNormalLike", [mu], dtype=_FLOAT, mean=0.0, scale=1.0)
    spread = builder.node("Mul", [noise, _sigma(builder, body, size, head, n)])
    sample = builder.node("Add", [mu, spread])
    _to_range(builder, sample, "continuous_actions", head.squash)
    builder.output("continuous_actions", np.float32, ("batch", n))
    builder.constant_output("continuous_action_output_shape", np.array([n], dtype=np.float32))
    _to_range(builder, mu, "deterministic_continuous_actions", head.squash)
    builder.output("deterministic_continuous_actions", np.float32, ("batch", n))


def discrete_heads(
    builder: GraphBuilder, body: str, size: int, branches: tuple[Dense, ...]
) -> None:
    """Add `action_masks`, `discrete_actions`, their shape constant and the deterministic ones."""
    sizes = [len(branch.weight) for branch in branches]
    masks = builder.input("action_masks", (sum(sizes),))
    sampled, best = [], []
    start = 0
    for index, branch in enumerate(branches):
        logits, n = builder.dense(body, size, branch, f"branch.{index}")
        mask = builder.node("Slice", [masks], axes=[1], starts=[start], ends=[start + n])
        start += n
        p = builder.node("Softmax", [_masked(builder, logits, mask)], axis=1)
        log_p = builder.node("Log", [p])
        sampled.append(builder.node("Multinomial", [log_p], dtype=_INT64, sample_size=1))
        best.append(builder.node("ArgMax", [p], axis=1, keepdims=1))
    builder.concat(sampled, "discrete_actions")
    builder.output("discrete_actions", np.int64, ("batch", len(sizes)))
    builder.constant_output("discrete_action_output_shape", np.array([sizes], dtype=np.float32))
    builder.concat(best, "deterministic_discrete_actions")
    builder.output("deterministic_discrete_actions", np.int64, ("batch", len(sizes)))


def _sigma(builder: GraphBuilder, body: str, size: int, head: ContinuousHead, n: int) -> str:
    if isinstance(head.log_sigma, Dense):
        raw, _ = builder.dense(body, size, head.log_sigma, "log_sigma")
        clipped = builder.node("Clip", [raw], min=LOG_SIGMA_MIN, max=LOG_SIGMA_MAX)
        return builder.node("Exp", [clipped])
    sigma = np.exp(np.asarray(head.log_sigma, dtype=np.float32).reshape(-1))
    return builder.weight(sigma, "sigma", (n,))


def _to_range(builder: GraphBuilder, action: str, output: str, squash: bool) -> None:
    """The environment's range: tanh, or ±3 scaled to ±1."""
    if squash:
        builder.node("Tanh", [action], output)
        return
    clipped = builder.node("Clip", [action], min=-ACTION_BOUND, max=ACTION_BOUND)
    builder.node("Div", [clipped, builder.scalar(ACTION_BOUND)], output)


def _masked(builder: GraphBuilder, logits: str, mask: str) -> str:
    """Forbidden logits pushed down: logits · m - 1e8 · (1 - m)."""
    forbidden = builder.node(
        "Add", [builder.node("Mul", [mask, builder.scalar(-1.0)]), builder.scalar(1.0)]
    )
    allowed = builder.node("Mul", [logits, mask])
    penalty = builder.node("Mul", [forbidden, builder.scalar(_FORBIDDEN)])
    return builder.node("Sub", [allowed, penalty])
