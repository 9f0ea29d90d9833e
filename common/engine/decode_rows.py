"""Attention of all decode rows of a layer in one call of the machine code of kernel_attention.py.

`DecodeAttention` is made once per model, `DecodeRows` once per forward. New rows are only noted when the model hands
them over; the call that attends writes them too. What the kernels do not do (`attend` gives None) is left to torch.
Engine thread only; float32 rows on the CPU. Knows slots and layouts, no models. Used by the runner and attention.py.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from common.engine.kernel_attention import CALL, PLAN, Attend, attention, scratch_floats
from common.engine.kernel_llvm import LANES
from common.engine.state import SlotState
from common.layout import StateLayout, StateSpec

Pieces = tuple[torch.Tensor, torch.Tensor]

# A block's keys and values stay in a core's second-level cache while all heads attend to them.
BLOCK_BYTES = 128 << 10
MIN_BLOCK, MAX_BLOCK = 16, 512
# Below so many multiplications, waking a second thread costs more than it saves.
MIN_PARALLEL = 1 << 17
_RECORD = struct.Struct(f"={len(CALL)}q")
_FLOAT32 = torch.float32


@dataclass(frozen=True, slots=True)
class _Plan:
    """What stays the same from call to call of one layer. Shapes are those of query and pieces behind the batch."""

    record: ctypes.Array[ctypes.c_int64]
    address: int
    scale: float
    window: int
    query: tuple[int, ...]
    first: tuple[int, ...]
    second: tuple[int, ...]
    out: tuple[int, ...]
    block: int
    work: int  # multiplications per token
    no_sinks: torch.Tensor

    @classmethod
    def make(cls, number: int, spec: StateSpec, rank: int, heads: int, scale: float) -> _Plan | None:
        """None when so many query heads cannot share the layer's key heads. `rank`: of latents, else 0."""
        kv_heads, key_dim = spec.tensors[0].shape
        value_dim = rank or spec.tensors[1].shape[1]
        pieces = (rank, key_dim - rank) if rank else (key_dim, value_dim)
        if heads % kv_heads or (not rank and spec.tensors[1].shape[0] != kv_heads):
            return None
        # What a token takes in the cache, which decides the order of sums and so must follow from the shape alone.
        token_bytes = 4 * kv_heads * (key_dim if rank else key_dim + value_dim)
        block = max(MIN_BLOCK, min(MAX_BLOCK, BLOCK_BYTES // token_bytes)) // LANES * LANES
        [scale_bits] = struct.unpack("<I", struct.pack("<f", scale))
        strides = (kv_heads * key_dim, kv_heads * (key_dim if rank else value_dim))
        sizes = (number, kv_heads, heads // kv_heads, key_dim, value_dim, *strides, spec.window, block, scale_bits)
        record = (ctypes.c_int64 * len(PLAN))(*sizes, *pieces, rank)
        return cls(
            record=record,
            address=ctypes.addressof(record),
            scale=scale,
            window=spec.window,
            query=(heads, 1, key_dim),
            first=(kv_heads, 1, pieces[0]),
            second=(kv_heads, 1, pieces[1]),
            out=(1, heads, value_dim),
            block=block,
            work=heads * (key_dim + value_dim),
            no_sinks=torch.full((heads,), -torch.inf),
        )


class DecodeAttention:
    """Plans of a model's layers, made when a layer first attends, and memory for one call."""

    def __init__(self, attend: Attend, layout: StateLayout, ranks: Mapping[int, int]) -> None:
        """`ranks`: of latent states, by state number."""
        self.attend = attend
        self.record = (ctypes.c_int64 * len(CALL))()
        self.record_at = ctypes.addressof(self.record)
        self._partial = torch.empty(0)
        self._layout, self._ranks = layout, ranks
        self._plans: dict[int, _Plan] = {}

    @classmethod
    def make(cls, layout: StateLayout, ranks: Mapping[int, int]) -> DecodeAttention | None:
        """None when there are no kernels, or no rows of float32 that they could attend to."""
        rows = [spec for spec in layout.states if spec.is_rows]
        if not rows or any(t.dtype != "float32" for spec in rows for t in spec.tensors):
            return None
        made = attention()
        return None if made is None else cls(made[0], layout, ranks)

    def rows(self, slots: Sequence[SlotState], starts: Sequence[int]) -> DecodeRows:
        """For a forward of one new token per slot.

        Raises:
            RequestFailed: a slot was freed.
            ValueError: a slot has no room for the token, or no longer has the rows it needs.
        """
        return DecodeRows(self, slots, starts)

    def plan(self, number: int, heads: int, scale: float) -> _Plan | None:
        """The plan of a layer."""
        found = self._plans.get(number)
        if found is None or found.scale != scale or found.query[0] != heads:
            made = _Plan.make(number, self._layout.states[number], self._ranks.get(number, 0), heads, scale)
            if made is None:
                return None
            found = self._plans[number] = made
        return found

    def partial(self, num_floats: int) -> int:
        """Address of scratch memory."""
        if self._partial.numel() < num_floats:
            self._partial = torch.empty(num_floats)
        return self._partial.data_ptr()


class DecodeRows:
    """The rows of one forward. New keys and values are noted by `add`, and in the slots once `attend` has run."""

    def __init__(self, owner: DecodeAttention, slots: Sequence[SlotState], starts: Sequence[int]) -> None:
        self._owner = owner
        # Kept, so that the memory lives as long as its addresses, whatever becomes of the slots.
        self._located = [slot.locate(start) for slot, start in zip(slots, starts, strict=True)]
        self._table = np.concatenate([located.addresses for located in self._located])
        self._starts = np.array(starts, dtype=np.int64)
        self._addresses = (self._table.ctypes.data, self._table.size // len(starts), self._starts.ctypes.data)
        self._num_threads = torch.get_num_threads()
        self._tokens: dict[int, tuple[int, int]] = {}
        self._new: dict[int, Pieces] = {}

    def add(self, number: int, first: torch.Tensor, second: torch.Tensor) -> None:
        """Note the new rows of state `number`: key and value, or the two pieces of a latent, [B, heads, 1, dim]."""
        self._new[number] = (first, second)

    def take(self, number: int) -> Pieces | None:
        """The noted rows of a state that are not in the slots; whoever takes them writes them."""
        return self._new.pop(number, None)

    def take_all(self) -> dict[int, Pieces]:
        """All noted rows that are not in the slots."""
        left, self._new = self._new, {}
        return left

    def attend(
        self, number: int, query: torch.Tensor, scale: float | None, sinks: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Write the noted rows of a state and attend from query [B, heads, 1, dim]; returns [B, 1, heads, dim].

        `sinks` [heads]: extra scores that take weight and give nothing. None, and nothing is done, when this is not
        something that the kernels do.
        """
        new = self._new.get(number)
        plan = self._owner.plan(number, query.shape[1], query.shape[3] ** -0.5 if scale is None else scale)
        if new is None or plan is None:
            return None
        first, second = new
        sinks = plan.no_sinks if sinks is None else sinks
        if (
            not (query.dtype is first.dtype is second.dtype is sinks.dtype is _FLOAT32)
            or sinks.numel() != plan.query[0]
        ):
            return None
        num = len(self._starts)
        if (
            query.shape != (num, *plan.query)
            or first.shape != (num, *plan.first)
            or second.shape != (num, *plan.second)
        ):
            return None
        del self._new[number]
        query, first, second, sinks = (
            t if t.stride(-1) == 1 else t.contiguous() for t in (query, first, second, sinks)
        )
        out = torch.empty((num, *plan.out))
        longest, total = self._counts(plan.window)
        num_blocks = -(-longest // plan.block)
        places = []
        for tensor in (query, first, second):
            row, head, _, _ = tensor.stride()
            places += [tensor.data_ptr(), row, head]
        partial = self._owner.partial(scratch_floats(num, num_blocks, plan.out[1], plan.out[2]))
        table, table_row, starts = self._addresses
        ends = (sinks.data_ptr(), out.data_ptr(), partial)
        table, table_row, starts = self._addresses
        values = (0, plan.address, table, table_row, starts, num, num_blocks, *places, *ends)
        _RECORD.pack_into(self._owner.record, 0, *values)
        self._owner.attend(self._owner.record_at, self._num_threads if total * plan.work >= MIN_PARALLEL else 1)
        return out

    def _counts(self, window: int) -> tuple[int, int]:
        """Tokens that the longest row, and all rows, attend to in a layer with this window (0: none)."""
        found = self._tokens.get(window)
        if found is None:
            counts = self._starts + 1
            if window:
                counts = np.minimum(counts, window)
            found = self._tokens[window] = (int(counts.max()), int(counts.sum()))
        return found
