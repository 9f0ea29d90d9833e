"""Kimi delta attention in the form that trains fastest on a CPU; the same function as the model's own.

transformers expands every pair of positions of a chunk by every channel and solves a triangular system row by row. Here
decays are split into a factor per position, so that everything is a product of small matrices, and the system is solved
by repeated squaring. The price: a decay below e^-8 per position counts as e^-8, which is to keep factors finite.
Called by train.py; a test compares outputs and gradients with the model's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.kimi_linear import modeling_kimi_linear

CHUNK = 16
# Half a chunk of it times a gradient of 1e10 is still within the range of float32.
MIN_LOG_DECAY = -8.0


@contextmanager
def fast_kda(*, forgets: bool = False) -> Iterator[None]:
    """Within this block every KimiLinear model of the process uses the forms below for whole sequences."""
    gate = modeling_kimi_linear.KimiLinearForgetGate
    own, own_forward = modeling_kimi_linear.chunk_kimi_delta_attention, gate.forward
    modeling_kimi_linear.chunk_kimi_delta_attention = partial(chunk_kda, forgets=forgets)
    gate.forward = _log_decay
    try:
        yield
    finally:
        modeling_kimi_linear.chunk_kimi_delta_attention = own
        gate.forward = own_forward


def _log_decay(gate: Any, hidden_states: Tensor) -> Tensor:
    """The forget gate's own function; its gradient is NaN in transformers' form where the gate is above 88."""
    raw = gate.f_b_proj(gate.f_a_proj(hidden_states)) + gate.dt_bias
    heads = raw.unflatten(-1, (-1, gate.head_dim))
    return -gate.A_log.exp() * functional.softplus(heads, threshold=20.0)


def chunk_kda(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    *,
    forgets: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """Outputs [batch, length, heads, dim] and the last state. q, k, v, g (log decay) are [batch, length, heads, dim],
    beta is [batch, length, heads]; q and k are normalised here, as the model asks its own function to do. With
    `forgets` nothing outlives its position: then it is another function, for training what is not to rely on the state.
    """
    length = query.shape[1]
    query, key = _unit(query) * query.shape[-1] ** -0.5, _unit(key)
    if forgets:
        return (query * key).sum(-1, keepdim=True) * value * beta.unsqueeze(-1), None
    query, key, value, g = (_chunks(x) for x in (query, key, value, g))
    beta = _chunks(beta.unsqueeze(-1))
    g = g.clamp(min=MIN_LOG_DECAY).cumsum(-2)
    middle = g[..., CHUNK // 2 - 1 : CHUNK // 2, :]
    fading = (g - middle).exp()
    rows = torch.cat((query * fading, key * beta * fading), -2)
    inner, within = (rows @ (key * (middle - g).exp()).transpose(-1, -2)).split((CHUNK, CHUNK), -2)
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool).triu()
    # What is masked may be infinite, so it is filled, not multiplied by zero.
    inner, within = inner.masked_fill(later.triu(1), 0.0), -within.masked_fill(later, 0.0)
    solved = _inverse(within) @ torch.cat((value * beta, key * beta * g.exp()), -1)
    new_values, removed = solved.split((value.shape[-1], key.shape[-1]), -1)
    out, state = _scan(inner, new_values, removed, query * g.exp(), key, g, initial_state)
    out = out.flatten(2, 3)[:, :, :length].transpose(1, 2)
    return out, state if output_final_state else None


def _unit(x: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _chunks(x: Tensor) -> Tensor:
    """[batch, length, heads, dim] to [batch, heads, chunks, CHUNK, dim], zeros at the end."""
    x = functional.pad(x.transpose(1, 2), (0, 0, 0, -x.shape[1] % CHUNK))
    return x.unflatten(2, (-1, CHUNK))


def _inverse(strict: Tensor) -> Tensor:
    """(1 - strict)^-1 of strictly lower triangular CHUNK x CHUNK matrices: (1 + s)(1 + s^2)(1 + s^4)(1 + s^8)."""
    one = torch.eye(CHUNK)
    result, power = one + strict, strict
    for _ in range(CHUNK.bit_length() - 2):
        power = power @ power
        result = result + power @ result
    return result


def _scan(
    inner: Tensor, new_values: Tensor, removed: Tensor, query: Tensor, key: Tensor, g: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Carry the state [batch, heads, key dim, value dim] from chunk to chunk."""
    batch, heads, dim = *key.shape[:2], key.shape[-1]
    state = torch.zeros(batch, heads, dim, new_values.shape[-1]) if state is None else state
    kept = g[..., -1, :].exp().unsqueeze(-1).unbind(2)
    writes = (key * (g[..., -1:, :] - g).exp()).transpose(-1, -2).unbind(2)
    reads = torch.cat((query, removed), -2).unbind(2)
    parts = zip(inner.unbind(2), new_values.unbind(2), reads, kept, writes, strict=True)
    outputs = []
    for scores, values, read, keep, write in parts:
        from_query, from_key = (read @ state).split((CHUNK, CHUNK), -2)
        values = values - from_key
        outputs.append(from_query + scores @ values)
        state = state * keep + write @ values
    return torch.stack(outputs, 2), state
