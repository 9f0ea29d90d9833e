"""Attention of all decode rows of a layer in one call of the machine code of kernel_attention.py.

`DecodeAttention` is made once per model, `DecodeRows` once per forward. New rows are only noted when the model hands
them over; the call that attends writes them too. What the kernels do not do (`attend` gives None) is left to torch.
Engine thread only; float32 rows on the CPU. Knows slots and layouts, no models. Used by the runner and attention.py.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from common.engine.chunk_attention import ChunkAttention, ChunkSizes
from common.engine.kernel_attention import CALL, PLAN, Attend, attention, scratch_floats
from common.engine.kernel_blocks import BLOCK
from common.engine.kernel_llvm import MIN_PARALLEL
from common.engine.state import SlotState
from common.engine.tape import recording, refuse
from common.errors import EngineError
from common.layout import StateLayout, StateSpec

Pieces = tuple[torch.Tensor, torch.Tensor]

_RECORD = struct.Struct(f"={len(CALL)}q")
_FLOAT32 = torch.float32


@dataclass(frozen=True, slots=True, eq=False)
class _Shape:
    """What layers of the same shape share. A new row comes in two pieces: key and value, or parts of a latent."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    pieces: tuple[int, int]
    rank: int  # of latents, else 0
    window: int

    @classmethod
    def of(cls, spec: StateSpec, rank: int, heads: int) -> _Shape | None:
        """None when so many query heads cannot share the layer's key heads."""
        kv_heads, key_dim = spec.tensors[0].shape
        value_heads, value_dim = (kv_heads, rank) if rank else spec.tensors[1].shape
        if value_heads != kv_heads or heads % kv_heads:
            return None
        pieces = (rank, key_dim - rank) if rank else (key_dim, value_dim)
        return cls(heads, kv_heads, key_dim, value_dim, pieces, rank, spec.window)

    @property
    def strides(self) -> tuple[int, int]:
        """Floats from one token's keys, and values, to the next's."""
        return self.kv_heads * self.key_dim, self.kv_heads * (self.key_dim if self.rank else self.value_dim)

    def record(self, number: int, scale: float) -> ctypes.Array[ctypes.c_int64]:
        """The kernel's plan of state `number`."""
        [scale_bits] = struct.unpack("<I", struct.pack("<f", scale))
        sizes = (self.kv_heads, self.heads // self.kv_heads, self.key_dim, self.value_dim, *self.strides)
        return (ctypes.c_int64 * len(PLAN))(number, *sizes, self.window, scale_bits, *self.pieces, self.rank)


class _Plan:
    """One layer, as it attended last."""

    def __init__(self, number: int, shape: _Shape, scale: float) -> None:
        self.shape, self.scale, self.number = shape, scale, number
        self._record = shape.record(number, scale)
        self.address = ctypes.addressof(self._record)
        self.no_sinks = torch.full((shape.heads,), -torch.inf)


class _Call(NamedTuple):
    """What calls of one forward for layers of one shape have in common."""

    shapes: tuple[tuple[int, ...], ...]  # query, pieces
    out: tuple[int, ...]
    num_attending: int
    num_blocks: int
    scratch: int  # floats
    threads: int
    chunk: ChunkSizes | None  # of the rows that are one chunk, if a kernel of its own attends for them


class DecodeAttention:
    """Plans of a model's layers, made when a layer first attends, and memory for one call."""

    def __init__(
        self, attend: Attend, layout: StateLayout, ranks: Mapping[int, int], chunks: ChunkAttention | None = None
    ) -> None:
        """`ranks`: of latent states, by state number. `chunks` attends for rows that are a chunk."""
        self.attend, self.chunks = attend, chunks
        self.record = (ctypes.c_int64 * len(CALL))()
        self.record_at = ctypes.addressof(self.record)
        self.current: DecodeRows | None = None  # of the forward that is being repeated
        self._partial = torch.empty(0)
        self._layout, self._ranks = layout, ranks
        self._plans: dict[int, _Plan] = {}
        self._shapes: dict[tuple[tuple[int, ...], ...], _Shape | None] = {}

    @classmethod
    def make(
        cls, layout: StateLayout, ranks: Mapping[int, int], chunks: ChunkAttention | None = None
    ) -> DecodeAttention | None:
        """None when there are no kernels, or no rows of float32 that they could attend to."""
        rows = [spec for spec in layout.states if spec.is_rows]
        if not rows or any(t.dtype != "float32" for spec in rows for t in spec.tensors):
            return None
        made = attention()
        return None if made is None else cls(made[0], layout, ranks, chunks)

    def rows(self, slots: Sequence[SlotState], starts: Sequence[int], num_chunk: int = 0) -> DecodeRows:
        """For a forward of one new token per slot; the last `num_chunk` are one chunk of one slot.

        Raises:
            RequestFailed: a slot was freed.
            ValueError: a slot has no room for the token, or no longer has the rows it needs.
        """
        return DecodeRows(self, slots, starts, num_chunk)

    def plan(self, number: int, heads: int, scale: float) -> _Plan | None:
        """The plan of a layer; None when the kernels cannot serve its shape."""
        found = self._plans.get(number)
        if found is not None and found.scale == scale and found.shape.heads == heads:
            return found
        spec, rank = self._layout.states[number], self._ranks.get(number, 0)
        key = ((heads, rank, spec.window), *(t.shape for t in spec.tensors))
        if key not in self._shapes:
            self._shapes[key] = _Shape.of(spec, rank, heads)
        shape = self._shapes[key]
        if shape is None:
            return None
        self._plans[number] = made = _Plan(number, shape, scale)
        return made

    def partial(self, num_floats: int) -> int:
        """Address of scratch memory."""
        if self._partial.numel() < num_floats:
            self._partial = torch.empty(num_floats, dtype=_FLOAT32)
        return self._partial.data_ptr()


@dataclass(frozen=True, slots=True)
class _Bind:
    """Makes one layer's call for good, for whatever rows are the owner's current ones (common/engine/tape.py)."""

    owner: DecodeAttention
    plan: _Plan

    def __call__(self, *tensors: torch.Tensor) -> Callable[[], object]:
        """Tensors: query, two pieces, sinks, output."""
        owner, plan = self.owner, self.plan
        places: list[int] = []
        for tensor in tensors[:3]:
            row, head, _, _ = tensor.stride()
            places += (tensor.data_ptr(), row, head)
        ends = (*places, *(tensor.data_ptr() for tensor in tensors[3:]))

        def call() -> None:
            if owner.current is None:
                raise EngineError("a forward is repeated without its rows")
            owner.current.run(plan, ends)

        return call


class DecodeRows:
    """The rows of one forward. New keys and values are noted by `add`, and in the slots once `attend` has run."""

    def __init__(
        self, owner: DecodeAttention, slots: Sequence[SlotState], starts: Sequence[int], num_chunk: int = 0
    ) -> None:
        self._owner, self._num_chunk = owner, num_chunk
        # Kept, so that the memory lives as long as its addresses, whatever becomes of the slots.
        self._located = [slot.locate(start) for slot, start in zip(slots, starts, strict=True)]
        self._table = np.concatenate([located.addresses for located in self._located])
        self._starts = np.array(starts, dtype=np.int64)
        self._places = (self._table.ctypes.data, self._table.size // len(starts), self._starts.ctypes.data, len(starts))
        self._calls: dict[_Shape, _Call] = {}
        self._new: dict[int, Pieces] = {}

    def add(self, number: int, first: torch.Tensor, second: torch.Tensor) -> None:
        """Note the new rows of state `number`: key and value, or the two pieces of a latent, [B, heads, 1, dim]."""
        self._new[number] = (first, second)

    def take(self, number: int) -> Pieces | None:
        """The noted rows of a state that are not in the slots; whoever takes them writes them."""
        refuse(f"torch attends for state {number}")
        return self._new.pop(number, None)

    def take_all(self) -> dict[int, Pieces]:
        """All noted rows that are not in the slots."""
        left, self._new = self._new, {}
        if left:
            refuse("rows are cached that nothing attends to")
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
        shapes, out_shape, *_ = self.call(plan.shape)
        if sinks is None:
            sinks = plan.no_sinks
        elif sinks.dtype is not _FLOAT32 or sinks.numel() != plan.shape.heads or not sinks.is_contiguous():
            return None
        places: list[int] = []
        for tensor, shape in zip((query, *new), shapes, strict=True):
            if tensor.dtype is not _FLOAT32 or tensor.shape != shape:
                return None
            row, head, _, step = tensor.stride()
            if step != 1:
                return None
            places += (tensor.data_ptr(), row, head)
        del self._new[number]
        tape = recording()
        if tape is None:
            out = torch.empty(out_shape, dtype=_FLOAT32)
            self.run(plan, (*places, sinks.data_ptr(), out.data_ptr()))
            return out
        with tape.native(_Bind(self._owner, plan), (query, *new, sinks)) as outs:
            outs.append(out := torch.empty(out_shape, dtype=_FLOAT32))
            self.run(plan, (*places, sinks.data_ptr(), out.data_ptr()))
        return out

    @contextmanager
    def as_current(self) -> Iterator[None]:
        """The calls of a repeated forward are about these rows."""
        self._owner.current = self
        try:
            yield
        finally:
            self._owner.current = None

    def run(self, plan: _Plan, places: tuple[int, ...]) -> None:
        """Write new rows and attend; `places`: address, row and head stride of each tensor, then sinks and output."""
        call, owner = self.call(plan.shape), self._owner
        partial = owner.partial(call.scratch)
        sizes = (call.num_attending, call.num_blocks)
        _RECORD.pack_into(owner.record, 0, 0, plan.address, *self._places, *sizes, *places, partial)
        owner.attend(owner.record_at, call.threads)
        if call.chunk is not None and owner.chunks is not None:
            self._run_chunk(owner.chunks, plan, call.chunk, places)

    def _run_chunk(self, chunks: ChunkAttention, plan: _Plan, sizes: ChunkSizes, places: tuple[int, ...]) -> None:
        """The last rows, of which the call before wrote keys and values."""
        shape, first = plan.shape, len(self._located) - sizes.length
        keys, values = self._located[-1].addresses[plan.number].tolist()
        query, row, head = places[:3]
        sinks, out = places[-2:]
        key_token, value_token = shape.strides
        own = (
            keys, key_token, shape.key_dim, values, value_token, shape.value_dim, query + 4 * first * row, row, head,
            sinks, out + 4 * first * shape.heads * shape.value_dim,
        )  # fmt: skip
        chunks.run(sizes, plan.scale, own)

    def call(self, shape: _Shape) -> _Call:
        """What calls for layers of this shape have in common."""
        return self._calls.get(shape) or self._call(shape)

    def _call(self, shape: _Shape) -> _Call:
        chunk = self._chunk(shape)
        num, num_attending = len(self._starts), len(self._starts) - (chunk.length if chunk is not None else 0)
        counts = self._starts[:num_attending] + 1
        if shape.window:
            counts = np.minimum(counts, shape.window)
        num_blocks = -(-int(counts.max()) // BLOCK)
        work = int(counts.sum()) * shape.heads * (shape.key_dim + shape.value_dim)
        made = self._calls[shape] = _Call(
            ((num, shape.heads, 1, shape.key_dim), *((num, shape.kv_heads, 1, dim) for dim in shape.pieces)),
            (num, 1, shape.heads, shape.value_dim),
            num_attending,
            num_blocks,
            scratch_floats(num, num_blocks, shape.heads, shape.value_dim),
            torch.get_num_threads() if work >= MIN_PARALLEL else 1,
            chunk,
        )
        return made

    def _chunk(self, shape: _Shape) -> ChunkSizes | None:
        """Sizes for the kernel of chunks; None without a chunk beside other rows, or if the kernel does not do it."""
        if not 0 < self._num_chunk < len(self._starts) or self._owner.chunks is None:
            return None
        num, dims = int(self._starts[-1]) + 1, (shape.heads, shape.kv_heads, shape.key_dim, shape.value_dim)
        sizes = ChunkSizes(*dims, shape.window, num, self._num_chunk)
        return sizes if sizes.is_served else None
