"""One attention layer with made-up rows, for tests of the kernels: its slots, a reference in float64, one call."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from common.engine import kernel_attention
from common.engine.decode_rows import DecodeAttention
from common.engine.state import SlotState
from common.layout import StateLayout, StateSpec, TensorSpec

CPU = torch.device("cpu")


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Layer:
    """Shapes of one layer and what its new token brings. Every row of memory that no token has is NaN."""

    heads: int = 6
    kv_heads: int = 2
    dim: int = 16
    value_dim: int = 16
    window: int = 0
    rank: int = 0
    room: int = 5

    @property
    def spec(self) -> StateSpec:
        if self.rank:
            return StateSpec(0, "latent", (TensorSpec("latent", (1, self.dim), "float32"),))
        kind = "window" if self.window else "full"
        shapes = {"k": (self.kv_heads, self.dim), "v": (self.kv_heads, self.value_dim)}
        tensors = tuple(TensorSpec(name, shape, "float32") for name, shape in shapes.items())
        return StateSpec(0, kind, tensors, window=self.window)

    @property
    def layout(self) -> StateLayout:
        # A layer on each side that must stay as it is.
        other = (TensorSpec("k", (1, 4), "float32"), TensorSpec("v", (1, 4), "float32"))
        return StateLayout((StateSpec(0, "full", other), self.spec, StateSpec(2, "full", other)))

    @property
    def widths(self) -> tuple[int, int]:
        return (self.rank, self.dim - self.rank) if self.rank else (self.dim, self.value_dim)

    def attention(self) -> DecodeAttention:
        made = DecodeAttention.make(self.layout, {1: self.rank} if self.rank else {})
        assert made is not None, kernel_attention.attention.reason
        return made

    def rows(self, num: int, seed: int) -> list[torch.Tensor]:
        """Both pieces of `num` tokens' rows, [num, kv heads, dim]."""
        heads = 1 if self.rank else self.kv_heads
        return [random(num, heads, width, seed=seed + i) for i, width in enumerate(self.widths)]

    def slot(self, num: int, seed: int, size: int = 0) -> SlotState:
        """A slot that holds `num` tokens and has room for one more, or for `size` in all."""
        slot = SlotState(self.layout, size or num + 1, self.room, CPU)
        for state in slot._layers:
            for tensor in state.tensors:
                tensor.fill_(torch.nan)
        pieces = self.rows(num, seed)
        for start in range(0, num, self.room):
            stop = min(num, start + self.room)
            new = [p[start:stop] for p in pieces]
            slot.write(1, start, [torch.cat(new, dim=-1)] if self.rank else new)
        return slot

    def query(self, seed: int) -> torch.Tensor:
        return random(1, self.heads, 1, self.dim, seed=seed)

    def expected(self, num: int, seed: int, scale: float | None = None, sinks: torch.Tensor | None = None):
        """Result [heads, dim] and what its rounding is measured by, in float64, for the token after `num` others."""
        pieces = [torch.cat(p).double() for p in zip(self.rows(num, seed), self.rows(1, seed + 500), strict=True)]
        keys, values = (torch.cat(pieces, dim=-1), pieces[0]) if self.rank else pieces
        first = max(0, num + 1 - self.window) if self.window else 0
        group = self.heads // keys.shape[1]
        keys, values = (t[first:].transpose(0, 1).repeat_interleave(group, 0) for t in (keys, values))
        query = self.query(seed)[0].double()
        scores = (query @ keys.transpose(1, 2))[:, 0] * (self.dim**-0.5 if scale is None else scale)
        extra = torch.full((self.heads, 1), -torch.inf) if sinks is None else sinks[:, None]
        weights = torch.cat([scores, extra.double()], dim=1).softmax(1)[:, None, :-1]
        return (weights @ values)[:, 0], (weights @ values.abs())[:, 0]


def run(layer: Layer, lengths, seeds=None, *, attention=None, scale=None, sinks=None, change=None):
    """Results [B, heads, dim] of a batch whose rows hold `lengths` tokens, and the slots."""
    seeds = seeds or list(range(0, 2000 * len(lengths), 2000))
    slots = [layer.slot(num, seed) for num, seed in zip(lengths, seeds, strict=True)]
    rows = (attention or layer.attention()).rows(slots, list(lengths))
    query = torch.cat([layer.query(seed) for seed in seeds])
    pieces = [torch.stack(p).transpose(1, 2) for p in zip(*(layer.rows(1, seed + 500) for seed in seeds), strict=True)]
    if change is not None:
        change(query, *pieces)
    rows.add(1, *pieces)
    out = rows.attend(1, query, scale, sinks)
    assert out is not None and out.shape[:2] == (len(lengths), 1)
    assert rows.take_all() == {}
    return out[:, 0], slots
