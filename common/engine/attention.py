"""Attention over slots: the function that transformers' model code calls instead of its own.

It reads the slots in place; no context is ever gathered or padded. Rows of a decode batch are at different positions:
kernels attend them all in one call (decode_rows.py), or torch does one by one where there are none. A chunk attends
once, by a kernel of its own (chunk_attention.py) or torch. Called through transformers' AttentionInterface with a
SlotContext.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows
from transformers import AttentionInterface

from common.engine.latent import LatentWeights
from common.engine.slot_cache import SlotContext
from common.errors import EngineError
from common.layout import StateSpec

ATTENTION_NAME = "prfaas_slots"
# Arguments of attention functions that change nothing here; any other that is set is refused.
_HARMLESS = {"position_ids", "use_cache", "is_causal", "return_dict", "output_attentions", "output_hidden_states"}


@dataclass(frozen=True, slots=True)
class Scoring:
    """What a layer does to its scores: scale, soft cap, and a learned extra score per head that attends to nothing."""

    scale: float | None
    softcap: float | None
    sinks: torch.Tensor | None


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    _key: torch.Tensor,
    _value: torch.Tensor,
    _attention_mask: torch.Tensor | None,
    *,
    slot_context: SlotContext,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attend from query [B, heads, c, dim] to the slots' rows; returns [B, c, heads, dim].

    Raises:
        EngineError: the model asks for something this function does not do.
    """
    context = slot_context
    number = context.index.rows(int(module.layer_idx))  # type: ignore[arg-type]
    spec = context.index.specs[number]
    _check_arguments(spec, others | {"dropout": dropout or None}, sliding_window or 0)
    scoring = Scoring(scaling, softcap, s_aux)
    if spec.kind == "latent":
        return _attend_latents(query, number, context, scoring), None
    done = _attend_rows(query, number, context, scoring)
    if done is not None:
        return done, None
    outputs = []
    for row, (slot, start) in enumerate(zip(context.slots, context.starts, strict=True)):
        keys, values = slot.read(number, spec.needed_from(start), start + context.length)
        outputs.append(_attend(query[row], keys, values, context, spec.window, scoring))
    return torch.stack(outputs), None


def _check_arguments(spec: StateSpec, others: dict[str, Any], window: int) -> None:
    unknown = [k for k, v in others.items() if v is not None and v is not False and k not in _HARMLESS]
    if unknown:
        raise EngineError(
            f"layer {spec.layer} asks for attention with {', '.join(sorted(unknown))}, which is not supported"
        )
    # Chunked attention, for one, also keeps a window of rows but means something else by it.
    if window != spec.window:
        raise EngineError(f"layer {spec.layer} keeps a window of {spec.window} but attends with one of {window}")


def _attend_rows(query: torch.Tensor, number: int, context: SlotContext, scoring: Scoring) -> torch.Tensor | None:
    """Decode rows by kernels: [B, 1, heads, dim]; None, with the new rows in the slots, where torch has to do it."""
    rows = context.rows
    if rows is None:
        return None
    done = rows.attend(number, query, scoring.scale, scoring.sinks) if scoring.softcap is None else None
    if done is None and (new := rows.take(number)) is not None:
        context.write(number, *new)
    return done


def _attend_latents(query: torch.Tensor, number: int, context: SlotContext, scoring: Scoring) -> torch.Tensor:
    """query [B, heads, c, nope + rope] over latent rows; returns [B, c, heads, v]."""
    weights: LatentWeights = context.latents[number]
    if scoring.sinks is not None:
        raise EngineError(f"layer {context.index.specs[number].layer} asks for latents with s_aux: not supported")
    if context.length > 1 and weights.expands(context.length):
        stop = context.starts[0] + context.length
        rows = context.slots[0].read(number, 0, stop)[0][:, 0].to(query.dtype)
        out = weights.expanded(query[0], rows, lambda q, k, v: _chunk_scored(q, k, v, context, scoring))
        return out.transpose(0, 1)[None]
    absorbed, outputs = weights.absorb(query), []
    if scoring.scale is None:
        scoring = Scoring(query.shape[-1] ** -0.5, scoring.softcap, scoring.sinks)
    done = _attend_rows(absorbed, number, context, scoring)
    if done is not None:
        return weights.project(done.transpose(1, 2)).transpose(1, 2)
    for row, (slot, start) in enumerate(zip(context.slots, context.starts, strict=True)):
        [rows] = slot.read(number, 0, start + context.length)
        outputs.append(_attend(absorbed[row], rows, rows[..., : weights.rank], context, 0, scoring))
    return weights.project(torch.stack(outputs).transpose(1, 2)).transpose(1, 2)


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    context: SlotContext,
    window: int,
    scoring: Scoring,
) -> torch.Tensor:
    """One row: query [heads, c, dim] over keys and values [n, kv heads, dim]; returns [c, heads, dim]."""
    done = _by_kernel(query, keys, values, context, window, scoring)
    if done is not None:
        return done
    heads, length, dim = query.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    # Query heads that share a key head become further queries of it, so K and V are not repeated.
    folded = query.reshape(1, kv_heads, group * length, dim)
    k = keys.to(query.dtype).transpose(0, 1)[None]
    v = values.to(query.dtype).transpose(0, 1)[None]
    mask = context.mask(window, group, query) if length > 1 else None
    out = _scored(folded, k, v, mask, scoring)
    return out.reshape(heads, length, v.shape[-1]).transpose(0, 1)


def _chunk_scored(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, context: SlotContext, scoring: Scoring
) -> torch.Tensor:
    """A chunk's query [1, heads, c, dim] over keys and values [1, heads, n, dim]; returns [1, heads, c, dim]."""
    done = _by_kernel(query[0], keys[0].transpose(0, 1), values[0].transpose(0, 1), context, 0, scoring)
    if done is not None:
        return done.transpose(0, 1)[None]
    return _scored(query, keys, values, context.mask(0, 1, query), scoring)


def _by_kernel(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, context: SlotContext, window: int, scoring: Scoring
) -> torch.Tensor | None:
    if context.chunks is None or scoring.softcap is not None:
        return None
    return context.chunks.attend(query, keys, values, window=window, scale=scoring.scale, sinks=scoring.sinks)


def _scored(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scoring: Scoring
) -> torch.Tensor:
    """query [1, kv heads, q, dim] over keys and values [1, kv heads, n, dim]; returns [1, kv heads, q, dim]."""
    if scoring.softcap is None and scoring.sinks is None:
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scoring.scale)
    scale = query.shape[-1] ** -0.5 if scoring.scale is None else scoring.scale
    scores = torch.matmul(query, keys.transpose(2, 3)).float() * scale
    if scoring.softcap is not None:
        scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    if mask is not None:
        scores = scores + mask
    if scoring.sinks is None:
        weights = torch.softmax(scores, dim=-1)
    else:
        # [kv heads, group] -> one extra column for each of a head's queries; it takes weight and gives nothing.
        kv_heads, num = scores.shape[1], scores.shape[2]
        sinks = scoring.sinks.float().view(1, kv_heads, -1, 1)
        sinks = sinks.repeat_interleave(num // sinks.shape[2], dim=2)
        weights = torch.softmax(torch.cat([scores, sinks], dim=-1), dim=-1)[..., :-1]
    return torch.matmul(weights.to(query.dtype), values)


AttentionInterface.register(ATTENTION_NAME, slot_attention)
