"""What transformers' model code gets instead of its own cache: writes go into slots, recurrent states come out of them.

One SlotCache serves one forward, which is either B decode rows (one new token each, any positions) or one chunk of one
sequence. Attention reads the slots through common/engine/attention.py. Knows no models and no scheduler.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows
from transformers.cache_utils import Cache

from common.engine.chunk_attention import ChunkAttention
from common.engine.decode_rows import DecodeRows
from common.engine.fixed import FixedRows
from common.engine.state import SlotState
from common.engine.tape import refuse
from common.errors import EngineError
from common.layout import StateLayout, StateSpec

CONV, RECURRENT = "conv", "recurrent"


class StateComplete(Exception):
    """Leaves a forward whose output nobody wants once its last state is written. Never leaves the runner."""


class StateIndex:
    """From the model's layer numbers to the layout's state numbers."""

    def __init__(self, layout: StateLayout) -> None:
        self.specs: tuple[StateSpec, ...] = layout.states
        self._rows = {s.layer: n for n, s in enumerate(layout.states) if s.is_rows}
        self._fixed = {s.layer: n for n, s in enumerate(layout.states) if not s.is_rows}
        self._tensors = {(s.layer, t.name): i for s in layout.states if not s.is_rows for i, t in enumerate(s.tensors)}

    def rows(self, layer: int) -> int:
        """State number of a layer's rows. Raises EngineError when it has none."""
        return self._find(self._rows, layer)

    def fixed(self, layer: int) -> int:
        """State number of a layer's recurrent state. Raises EngineError when it has none."""
        return self._find(self._fixed, layer)

    def tensor(self, layer: int, kind: str, index: int) -> int | None:
        """Which tensor of a layer's recurrent state is its conv or recurrent state `index`; None when it has none."""
        return self._tensors.get((layer, f"{kind}{index}"))

    @staticmethod
    def _find(numbers: dict[int, int], layer: int) -> int:
        number = numbers.get(layer)
        if number is None:
            raise EngineError(f"layer {layer} uses state that it did not show when it was probed")
        return number


@dataclass(slots=True)
class SlotContext:
    """What one forward reads and writes.

    Attributes:
        starts: position of the first new token, per row.
        length: new tokens per row.
        fixed: recurrent states of the rows, when the model has any.
        is_chunk: one sequence's chunk; else decode rows.
        on_layer: told each state number, in order, once its new state is in the slots.
        num_sampled: how many of the rows, the first, get logits; 0 means all.
        stops_early: the forward may be abandoned when all state is written.
        latents: weights for attention over latents, by state number (common/engine/latent.py).
        rows: writes and attends, when kernels do that for decode rows.
        chunks: attends, when a kernel does that for a chunk.
    """

    index: StateIndex
    slots: list[SlotState]
    starts: list[int]
    length: int
    fixed: FixedRows | None = None
    is_chunk: bool = False
    num_sampled: int = 0
    on_layer: Callable[[int], None] | None = None
    stops_early: bool = False
    latents: dict[int, Any] = field(default_factory=dict)
    rows: DecodeRows | None = None
    chunks: ChunkAttention | None = None
    masks: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)

    def write(self, number: int, first: torch.Tensor, second: torch.Tensor) -> None:
        """Put new rows of state `number` into the slots: keys and values, or pieces of latents, [B, heads, c, dim]."""
        # [B, c, heads, dim]: rows become token-major, as the slots hold them.
        rows = [first.transpose(1, 2), second.transpose(1, 2)]
        if self.index.specs[number].kind == "latent":
            rows = [torch.cat(rows, dim=-1)]
        for i, (slot, start) in enumerate(zip(self.slots, self.starts, strict=True)):
            slot.write(number, start, [r[i] for r in rows])

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
        self._next = 0  # all states before this number are written
        self._written: set[int] = set()
        self._parts: dict[int, set[int]] = {}

    # -- rows

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new rows, [B, heads, c, dim] each, into the slots of layer `layer_idx`."""
        context = self.context
        self._enter(layer_idx)
        number = context.index.rows(layer_idx)
        if context.rows is None:
            refuse(f"torch attends for state {number}")
            context.write(number, key_states, value_states)
        else:
            context.rows.add(number, key_states, value_states)
        self._is_written(number)
        return key_states, value_states

    # -- recurrent state, [B, ...]; zero before the first token

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """The last inputs of a convolution [B, channels, kernel]; models change it in place."""
        return self._past(layer_idx, CONV, state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """The recurrent state; models change it in place."""
        return self._past(layer_idx, RECURRENT, state_idx)

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_kwargs: Any
    ) -> torch.Tensor:
        """Append inputs [B, channels, c]; returns them behind the earlier ones that the convolution still sees."""
        state = self._fixed(layer_idx, CONV, state_idx)
        if self._has_past:
            conv_states = torch.cat([state, conv_states], dim=-1)
        kernel = state.shape[-1]
        state.copy_(F.pad(conv_states, (max(0, kernel - conv_states.shape[-1]), 0))[..., -kernel:])
        self._is_part_written(layer_idx, CONV, state_idx)
        return conv_states

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_kwargs: Any
    ) -> torch.Tensor:
        """Replace the recurrent state."""
        state = self._fixed(layer_idx, RECURRENT, state_idx)
        state.copy_(recurrent_states)
        self._is_part_written(layer_idx, RECURRENT, state_idx)
        return state

    # -- what model code asks

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens before this forward; only meaningful for a chunk."""
        refuse("the model asks how many tokens came before")
        return self.context.starts[0]

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether recurrent layers continue from a state."""
        return self._has_past

    def is_recording_past(self, layer_idx: int) -> bool:
        """Never: nothing is rolled back."""
        return False

    # -- progress

    def finish(self) -> None:
        """The forward is over: whatever changed in place is complete now."""
        if self.context.rows is not None:
            for number, (first, second) in self.context.rows.take_all().items():
                self.context.write(number, first, second)
        self._advance_to(len(self.context.index.specs))

    @property
    def _has_past(self) -> bool:
        # Decode rows are at different positions; a state of zeros is the same as none.
        return not self.context.is_chunk or self.context.starts[0] > 0

    def _past(self, layer: int, kind: str, index: int) -> torch.Tensor | None:
        self._enter(layer)
        number = self.context.index.fixed(layer)
        tensor = self.context.index.tensor(layer, kind, index)
        if tensor is None or not self._has_past:
            return None
        return self._tensors(number)[tensor]

    def _fixed(self, layer: int, kind: str, index: int) -> torch.Tensor:
        self._enter(layer)
        number = self.context.index.fixed(layer)
        tensor = self.context.index.tensor(layer, kind, index)
        if tensor is None:
            raise EngineError(f"layer {layer} has a {kind} state {index} that it did not show when it was probed")
        return self._tensors(number)[tensor]

    def _tensors(self, number: int) -> tuple[torch.Tensor, ...]:
        if self.context.fixed is None:
            raise EngineError("a forward of a model with recurrent state was started without it")
        return self.context.fixed.tensors(number)

    def _enter(self, layer: int) -> None:
        """Layers run in order: when one begins, the state of those before it is complete."""
        specs, number = self.context.index.specs, self._next
        while number < len(specs) and specs[number].layer < layer:
            number += 1
        self._advance_to(number)

    def _is_part_written(self, layer: int, kind: str, index: int) -> None:
        number = self.context.index.fixed(layer)
        parts = self._parts.setdefault(number, set())
        parts.add(self.context.index.tensor(layer, kind, index) or 0)
        if len(parts) == len(self.context.index.specs[number].tensors):
            self._is_written(number)

    def _is_written(self, number: int) -> None:
        self._written.add(number)
        stop = self._next
        while stop in self._written:
            stop += 1
        self._advance_to(stop)
        if self.context.stops_early and self._next == len(self.context.index.specs):
            raise StateComplete

    def _advance_to(self, number: int) -> None:
        while self._next < number:
            if self.context.on_layer is not None:
                self.context.on_layer(self._next)
            self._next += 1
