"""Slots of the torch engine: one sequence's state as token-major tensors, so that any run of rows is one memoryview.

    full    [num_tokens, heads, dim]                       row i is token i
    window  [w - 1 + room, heads, dim], row 0 is `base`    a full buffer is replaced, never moved within itself,
                                                           so exported views stay as they are
    recurrent  all layers in one row of bytes (fixed.py)   changed in place, so exports are copies
Knows layouts and tensors, no model and no scheduler. On CPU, imports and exports are views of the slot itself; on
another device they go through host memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from common.engine.fixed import TORCH_DTYPES, FixedLayout
from common.errors import RequestFailed
from common.layout import StateLayout, StateSpec
from common.sched.executor import Slot
from common.sched.specs import slot_bytes, slot_rows

Rows = list[torch.Tensor]


@dataclass(slots=True)
class LayerState:
    """Tensors of one layer; row 0 is token `base`."""

    tensors: Rows
    base: int = 0


@dataclass(frozen=True, slots=True)
class Located:
    """Where a slot's rows lie: for a new token at any position in [first, stop), until the buffers change.

    Attributes:
        addresses: int64 [states, 2]: of the row of token 0, had it a place, in each tensor (twice if there is but one).
        tensors: hold the memory.
    """

    addresses: np.ndarray
    tensors: tuple[torch.Tensor, ...]
    first: int
    stop: int


class SlotState:
    """One sequence's state (the Slot protocol). Memory of rows is touched only as they are written.

    `fixed` is the row of recurrent states; a batch replaces it by a row of its own (FixedBatch).
    """

    def __init__(
        self,
        layout: StateLayout,
        num_tokens: int,
        room: int,
        device: torch.device,
        fixed_layout: FixedLayout | None = None,
        *,
        parks: bool | None = None,
    ) -> None:
        """`parks`: whether parking moves the state to host memory; by default where that is another memory."""
        self._layout, self._num_tokens, self._room, self._device = layout, num_tokens, room, device
        self._fixed_layout = fixed_layout or FixedLayout(layout)
        self.fixed = self._fixed_layout.new_row(device)
        self._has_staging = device.type != "cpu"
        self._parks = self._has_staging if parks is None else parks
        self._parked: list[Rows] = []
        self._staged: dict[tuple[int, int, tuple[int, ...]], Rows] = {}
        self._layers = [LayerState(self._allocate(spec)) for spec in layout.states]
        self._located: Located | None = None

    @property
    def num_bytes(self) -> dict[str, int]:
        """Memory held, by layer kind ("host" while it is parked elsewhere); empty after `free`."""
        if self._parked:
            return {"host": sum(t.nbytes for rows in self._parked for t in rows) + self.fixed.nbytes}
        return slot_bytes(self._layout, self._num_tokens, self._room) if self._layers else {}

    # -- used by the attention function

    def write(self, layer: int, start: int, new: Rows) -> None:
        """Put rows of tokens [start, start + c) into layer number `layer`; each of `new` is [c, *row shape]."""
        state, stop = self._layers[layer], start + new[0].shape[0]
        if stop - state.base > state.tensors[0].shape[0]:
            self._slide(state, self._layout.states[layer], start, stop)
        for tensor, rows in zip(state.tensors, new, strict=True):
            tensor[start - state.base : stop - state.base] = rows

    def read(self, layer: int, first: int, stop: int) -> Rows:
        """Views of rows [first, stop), each [stop - first, *row shape]."""
        state = self._layers[layer]
        return [t[first - state.base : stop - state.base] for t in state.tensors]

    def locate(self, start: int, stop: int = 0) -> Located:
        """Where the rows lie, once there is room in every layer for new ones in [start, stop), by default for one.

        Raises:
            RequestFailed: the slot was freed.
            ValueError: `start` does not fit, or a row that it needs is no longer kept.
        """
        found, stop = self._located, stop or start + 1
        if found is None or not (found.first <= start and stop <= found.stop):
            found = self._located = self._locate(start, stop)
        return found

    # -- the Slot protocol

    def prepare_import(self, num_tokens: int) -> None:
        """State of [0, num_tokens) will be written through `writable`."""
        for state, spec in zip(self._layers, self._layout.states, strict=True):
            state.base = spec.needed_from(num_tokens)
        self._located = None

    def writable(self, start: int, stop: int, layers: tuple[int, ...]) -> tuple[memoryview, ...]:
        """Memory for the segment's rows. Raises RequestFailed when the slot was freed or the rows are outside it."""
        parts = self._parts(start, stop, layers)
        if self._has_staging:
            key = (start, stop, layers)
            parts = self._staged.setdefault(key, [torch.empty_like(p, device="cpu") for p in parts])
        return tuple(_bytes_of(part) for part in parts)

    def landed(self, start: int, stop: int, layers: tuple[int, ...]) -> None:
        """Move staged bytes to the device; on CPU they are in place already."""
        staged = self._staged.pop((start, stop, layers), None)
        if staged is not None:
            for target, source in zip(self._parts(start, stop, layers), staged, strict=True):
                target.copy_(source)

    def exported(self, start: int, stop: int, layers: tuple[int, ...]) -> tuple[memoryview, ...]:
        """Read-only views of computed rows; copies of what is on another device or changes in place."""
        parts: Rows = []
        for layer in layers:
            own = self._parts(start, stop, (layer,))
            parts += own if self._layout.states[layer].is_rows else [p.clone() for p in own]
        return tuple(_bytes_of(part.cpu()).toreadonly() for part in parts)

    def first_row(self, layers: tuple[int, ...]) -> int:
        """The first token whose rows are still there in all of these layers."""
        return max((self._layers[n].base for n in layers), default=0)

    def copy_from(self, source: Slot, num_tokens: int) -> None:
        """Become a copy of `source`, which holds [0, num_tokens)."""
        if not isinstance(source, SlotState):
            raise TypeError(f"cannot copy a {type(source).__name__}")
        for mine, other in zip(self._layers, source._layers, strict=True):
            mine.base = other.base
            for target, rows in zip(mine.tensors, other.tensors, strict=True):
                target[: num_tokens - other.base] = rows[: num_tokens - other.base]
        self.fixed.copy_(source.fixed)
        self._located = None

    def park(self, num_tokens: int) -> None:
        """Leave the batch, and the device if there is one: only what a continuation at `num_tokens` reads is kept."""
        self.fixed = self.fixed.to("cpu", copy=True)
        if not self._parks:
            return
        self._located = None
        for state, spec in zip(self._layers, self._layout.states, strict=True):
            first = spec.needed_from(num_tokens) if spec.is_rows else 0
            self._parked.append([t[first - state.base : num_tokens - state.base].cpu().clone() for t in state.tensors])
            state.tensors, state.base = [], first

    def unpark(self) -> None:
        """Come back. Raises RequestFailed when there is no memory."""
        try:
            self.fixed = self.fixed.to(self._device)
            for state, spec, parked in zip(self._layers, self._layout.states, self._parked, strict=False):
                state.tensors = self._allocate(spec)
                for target, rows in zip(state.tensors, parked, strict=True):
                    target[: rows.shape[0]] = rows
        except (RuntimeError, MemoryError) as e:
            raise RequestFailed(f"no memory to bring back the state of a preempted sequence: {e}") from e
        self._parked = []

    def free(self) -> None:
        """Drop the memory; exported views keep theirs."""
        self._layers = []
        self._located = None
        self._parked = []
        self._staged = {}
        self.fixed = torch.empty(0, dtype=torch.uint8)

    def _allocate(self, spec: StateSpec) -> Rows:
        if not spec.is_rows:
            return []
        rows = slot_rows(spec, self._num_tokens, self._room)
        return [torch.empty((rows, *t.shape), dtype=TORCH_DTYPES[t.dtype], device=self._device) for t in spec.tensors]

    def _slide(self, state: LayerState, spec: StateSpec, start: int, stop: int) -> None:
        """Fresh buffers that keep what a continuation at `start` reads."""
        first = spec.needed_from(start)
        try:
            fresh = self._allocate(spec)
        except (RuntimeError, MemoryError) as e:
            raise RequestFailed(f"no memory to move the window of layer {spec.layer}: {e}") from e
        if spec.kind != "window" or stop - first > fresh[0].shape[0]:
            raise ValueError(f"rows [{start}, {stop}) do not fit a slot of {self._num_tokens} tokens")
        for new, old in zip(fresh, state.tensors, strict=True):
            new[: start - first] = old[first - state.base : start - state.base]
        state.tensors, state.base = fresh, first
        self._located = None

    def _locate(self, start: int, end: int) -> Located:
        if not self._layers or self._parked:
            raise RequestFailed("the sequence is gone, and its state memory with it")
        first, stop, tensors = 0, self._num_tokens, []
        addresses = np.zeros((len(self._layers), 2), dtype=np.int64)
        for number, (state, spec) in enumerate(zip(self._layers, self._layout.states, strict=True)):
            if not spec.is_rows:
                continue
            if end - state.base > state.tensors[0].shape[0]:
                self._slide(state, spec, start, end)
            if spec.needed_from(start) < state.base:
                raise ValueError(f"layer number {number} no longer has the rows that a token at {start} attends to")
            first = max(first, state.base + spec.window - 1 if state.base else 0)
            stop = min(stop, state.base + state.tensors[0].shape[0])
            addresses[number] = [t.data_ptr() - state.base * t.stride(0) * t.element_size() for t in state.tensors]
            tensors += state.tensors
        return Located(addresses, tuple(tensors), first, stop)

    def _parts(self, start: int, stop: int, layers: tuple[int, ...]) -> Rows:
        states = self._layers
        if not states:
            raise RequestFailed("the sequence is gone, and its state memory with it")
        parts: Rows = []
        for layer in layers:
            if layer in self._fixed_layout.parts:
                parts += [p.view(self.fixed[None])[0] for p in self._fixed_layout.parts[layer]]
                continue
            state = states[layer]
            if not 0 <= start - state.base < stop - state.base <= state.tensors[0].shape[0]:
                raise RequestFailed(f"rows [{start}, {stop}) of layer number {layer} are outside the slot")
            parts += [t[start - state.base : stop - state.base] for t in state.tensors]
        return parts


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous host tensor, without a copy; the view keeps the memory alive."""
    view: memoryview = tensor.reshape(-1).view(torch.uint8).numpy().data
    return view
