"""Which model, and what state it has: one StateSpec per (layer, kind), in wire order. Plain data; no model families.

Kinds: `full` (rows for every token), `window` (the last window-1 earlier rows matter), `latent` (MLA rows), `recurrent`
(fixed size, valid at exactly one position). A layer that is two at once has two entries. Everywhere on the wire and in
the engine a "layer number" is an index into StateLayout.states.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import prod
from typing import Any, Literal

# How prefixes are cut into blocks and named (common/sched/prefixes.py); compared in the handshake.
BLOCK_TOKENS = 64
HASH_SCHEME = "sha256-chain-1"

Kind = Literal["full", "window", "latent", "recurrent"]
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "uint8": 1, "int32": 4, "int64": 8, "float64": 8}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a state. `shape` is per token (heads, head_dim) for row kinds, whole for `recurrent`."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's row (of the whole tensor for `recurrent`)."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class StateSpec:
    """State of one kind in one layer. `window` counts the token itself (window-1 earlier rows matter), else 0."""

    layer: int
    kind: Kind
    tensors: tuple[TensorSpec, ...]
    window: int = 0

    @property
    def is_rows(self) -> bool:
        """True when the state is one row per token (all kinds but `recurrent`)."""
        return self.kind != "recurrent"

    def needed_from(self, position: int) -> int:
        """First token row that a continuation at `position` reads."""
        return max(0, position - self.window + 1) if self.kind == "window" else 0

    def num_bytes(self, num_tokens: int) -> int:
        """Bytes of `num_tokens` rows (fixed for `recurrent`)."""
        rows = num_tokens if self.is_rows else 1
        return rows * sum(t.row_bytes for t in self.tensors)


@dataclass(frozen=True, slots=True)
class StateLayout:
    """All states of a model in wire order.

    A segment (start, stop, layers) holds, for each layer number in the order given and for each tensor of that state,
    rows [start, stop) token by token, C order, little endian; nothing between them.
    """

    states: tuple[StateSpec, ...]

    @property
    def digest(self) -> str:
        """Hex digest of kinds, shapes and dtypes; equal layouts have equal digests on every machine."""
        text = json.dumps([asdict(s) for s in self.states], sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    @property
    def token_bytes(self) -> int:
        """Bytes per token over the `full` and `latent` states."""
        return sum(s.num_bytes(1) for s in self.states if s.kind in ("full", "latent"))

    @property
    def fixed_bytes(self) -> int:
        """Bytes over the `window` and `recurrent` states of a prompt that fills its windows."""
        return sum(s.num_bytes(max(1, s.window - 1)) for s in self.states if s.kind in ("window", "recurrent"))

    @property
    def summary(self) -> str:
        """For people: "15 window(512), 3 full"."""
        named = Counter(f"window({s.window})" if s.kind == "window" else s.kind for s in self.states)
        return ", ".join(f"{num} {kind}" for kind, num in named.most_common())

    def segment_bytes(self, start: int, stop: int, layers: tuple[int, ...]) -> int:
        """Raw bytes of a segment. Raises IndexError when a layer number is not in the layout."""
        return sum(self.states[n].num_bytes(stop - start) for n in layers)

    def transfer_bytes(self, start: int, stop: int) -> int:
        """Raw bytes that must cross for a receiver that holds [0, start) to continue at `stop`."""
        total = 0
        for spec in self.states:
            first = max(start, spec.needed_from(stop) if spec.is_rows else stop - 1)
            total += spec.num_bytes(stop - first) if first < stop else 0
        return total

    def required_segments(self, start: int, stop: int) -> dict[int, tuple[int, int]]:
        """Layer number -> rows [first, stop) that must have arrived before a token is made at `stop`."""
        out: dict[int, tuple[int, int]] = {}
        for n, spec in enumerate(self.states):
            first = max(start, spec.needed_from(stop)) if spec.is_rows else max(start, stop - 1)
            if first < stop:
                out[n] = (first, stop)
        return out


# What decides about tokens, not only about their last bit.
_TELLING_NUMERICS = ("weights", "dtype", "kv_dtype")
# Both hold the weights as they are.
_SAME_WEIGHTS = {"torch": "exact"}


def numerics_differ(ours: Mapping[str, str], theirs: object) -> dict[str, dict[str, str]]:
    """Settings by which two ends of one model compute visibly other tokens: name to {"ours", "theirs"}.

    `theirs` is a mapping like ours, or anything else before the peer told. Device, threads and chunks differ as a rule
    and only round otherwise; what one end does not tell is left out.
    """
    if not isinstance(theirs, Mapping):
        return {}
    told = [name for name in _TELLING_NUMERICS if name in ours and name in theirs]
    return {
        name: {"ours": ours[name], "theirs": theirs[name]}
        for name in told
        if _SAME_WEIGHTS.get(ours[name], ours[name]) != _SAME_WEIGHTS.get(theirs[name], theirs[name])
    }


def numerics_text(differences: Mapping[str, Mapping[str, str]]) -> str:
    """The same in a line, "" for none."""
    pairs = ", ".join(f"{name} {pair['ours']}/{pair['theirs']}" for name, pair in differences.items())
    return pairs and f"numerics differ (ours/theirs): {pairs}"


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Identity and limits of the loaded model. Digests are hex; equal content has equal digests on every machine."""

    name: str
    weights_digest: str
    config_digest: str
    tokenizer_digest: str
    layout: StateLayout
    vocab_size: int
    max_context: int
    eos_token_ids: tuple[int, ...]
    numerics: dict[str, str] = field(default_factory=dict)

    @property
    def facts(self) -> dict[str, Any]:
        """What `status` of either daemon shows."""
        return {
            "name": self.name, "digest": self.weights_digest[:16], **self.numerics, "state": self.layout.summary,
        }  # fmt: skip
