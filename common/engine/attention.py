"""Attention over slots: what transformers' model code calls instead of its own cache and attention.

A SlotCache takes the place of the cache of one forward: its `update` writes new K and V rows into the slots. The
attention function registered here then reads the slots in place; no context is ever gathered or padded. One forward is
either B decode rows (one new token each, any positions) or one chunk of one sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows
from transformers import AttentionInterface
from transformers.cache_utils import Cache

from common.engine.state import SlotState
from common.errors import EngineError
from common.layout import StateSpec

ATTENTION_NAME = "prfaas_slots"
# Arguments of attention functions that change nothing here; any other that is set is refused.
_HARMLESS = {"position_ids", "use_cache", "is_causal", "return_dict"}


class StateComplete(Exception):
    """Leaves a forward whose output nobody wants once its last state row is written. Never leaves the runner."""


@dataclass(slots=True)
class SlotContext:
    """What one forward reads and writes.

    Attributes:
        specs: the layout's states; `number_of[i]` is the state number of the model's layer i.
        starts: position of the first new token, per row.
        on_layer: told the state number once a layer's new rows are in the slots.
        stops_at: state number after which the forward may be abandoned, or -1.
    """

    specs: tuple[StateSpec, ...]
    number_of: dict[int, int]
    slots: list[SlotState]
    starts: list[int]
    length: int
    on_layer: Callable[[int], None] | None = None
    stops_at: int = -1
    masks: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)

    def mask(self, window: int, group: int, query: torch.Tensor) -> torch.Tensor:
        """Additive mask [group * c, keys] of a chunk, repeated for the query heads that share a key head."""
        found = self.masks.get((window, group))
        if found is None:
            start, stop = self.starts[0], self.starts[0] + self.length
            positions = torch.arange(start, stop, device=query.device)[:, None]
            first = max(0, start - window + 1) if window else 0
            keys = torch.arange(first, stop, device=query.device)[None, :]
            hidden = keys > positions
            if window:
                hidden = hidden | (keys <= positions - window)
            one = torch.zeros(hidden.shape, dtype=query.dtype, device=query.device).masked_fill_(hidden, -torch.inf)
            found = self.masks[(window, group)] = one.repeat(group, 1)
        return found


class SlotCache(Cache):
    """The cache of one forward, in place of transformers' own."""

    def __init__(self, context: SlotContext) -> None:
        super().__init__(layers=[])
        self.context = context

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new rows, [B, heads, c, dim] each, into the slots of layer `layer_idx`."""
        context = self.context
        number = context.number_of[layer_idx]
        # [B, c, heads, dim]: rows become token-major, as the slots hold them.
        keys, values = key_states.transpose(1, 2), value_states.transpose(1, 2)
        for row, (slot, start) in enumerate(zip(context.slots, context.starts, strict=True)):
            slot.write(number, start, [keys[row], values[row]])
        if context.on_layer is not None:
            context.on_layer(number)
        if number == context.stops_at:
            raise StateComplete
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens before this forward; only meaningful for a chunk."""
        return self.context.starts[0]


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
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attend from query [B, heads, c, dim] to the slots' rows; returns [B, c, heads, dim].

    Raises:
        EngineError: the model asks for something this function does not do.
    """
    number = slot_context.number_of[int(module.layer_idx)]  # type: ignore[arg-type]
    spec = slot_context.specs[number]
    _check_arguments(spec, others | {"dropout": dropout or None}, sliding_window or 0)
    outputs = []
    for row, (slot, start) in enumerate(zip(slot_context.slots, slot_context.starts, strict=True)):
        stop = start + slot_context.length
        keys, values = slot.read(number, spec.needed_from(start), stop)
        outputs.append(_attend(query[row], keys, values, slot_context, spec.window, scaling, softcap))
    return torch.stack(outputs), None


def _check_arguments(spec: StateSpec, others: dict[str, Any], window: int) -> None:
    unknown = sorted(k for k, v in others.items() if v is not None and v is not False and k not in _HARMLESS)
    if unknown:
        raise EngineError(f"layer {spec.layer} asks for attention with {', '.join(unknown)}, which is not supported")
    # Chunked attention, for one, also keeps a window of rows but means something else by it.
    if window != spec.window:
        raise EngineError(f"layer {spec.layer} keeps a window of {spec.window} but attends with one of {window}")


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    context: SlotContext,
    window: int,
    scaling: float | None,
    softcap: float | None,
) -> torch.Tensor:
    """One row: query [heads, c, dim] over keys and values [n, kv heads, dim]; returns [c, heads, dim]."""
    heads, length, dim = query.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    # Query heads that share a key head become further queries of it, so K and V are not repeated.
    folded = query.reshape(1, kv_heads, group * length, dim)
    k = keys.to(query.dtype).transpose(0, 1)[None]
    v = values.to(query.dtype).transpose(0, 1)[None]
    mask = context.mask(window, group, query) if length > 1 else None
    if softcap is None:
        out = F.scaled_dot_product_attention(folded, k, v, attn_mask=mask, scale=scaling)
    else:
        out = _capped(folded, k, v, mask, scaling, softcap)
    return out.reshape(heads, length, v.shape[-1]).transpose(0, 1)


def _capped(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    softcap: float,
) -> torch.Tensor:
    """Attention whose scores pass through softcap * tanh(scores / softcap)."""
    scores = torch.matmul(query, keys.transpose(2, 3)) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.matmul(weights, values)


AttentionInterface.register(ATTENTION_NAME, slot_attention)
