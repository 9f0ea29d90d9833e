"""What the scheduler and the worker need from whatever computes: slots that hold state, and two kinds of forward.

Implemented by common/engine/runner.py (torch) and common/fake.py. Knows no event loop, no clock, no tensors: state
crosses as byte views in StateLayout's segment order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from common.errors import RequestFailed
from common.layout import ModelInfo
from common.request import TokenLogprob

if TYPE_CHECKING:
    from common.sched import sequence as seq


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a decode row came to: a token, or the error that ends this sequence alone."""

    token_id: int
    logprob: TokenLogprob | None = None
    error: RequestFailed | None = None


class Slot(Protocol):
    """One sequence's state.

    `writable` and `landed` may be called from any thread, the rest by the engine thread; while the sequence is held, so
    that no step touches it, `prepare_import` and `exported` by the event loop too.
    """

    @property
    def num_bytes(self) -> dict[str, int]:
        """Memory held, by layer kind; empty after `free`."""

    def prepare_import(self, num_tokens: int) -> None:
        """State of [0, num_tokens) will be written by `writable`; a continuation starts there."""

    def writable(self, start: int, stop: int, layers: tuple[int, ...]) -> tuple[memoryview, ...]:
        """Memory for rows [start, stop) of the layer numbers. Raises RequestFailed when the slot was freed."""

    def landed(self, start: int, stop: int, layers: tuple[int, ...]) -> None:
        """The bytes of an earlier `writable` are in place."""

    def exported(self, start: int, stop: int, layers: tuple[int, ...]) -> tuple[memoryview, ...]:
        """Read-only views of computed rows; they stay valid and unchanged however the slot goes on."""

    def first_row(self, layers: tuple[int, ...]) -> int:
        """The first token whose rows are still there in all of these layers."""

    def copy_from(self, source: Slot, num_tokens: int) -> None:
        """Become a copy of `source`, which holds [0, num_tokens)."""

    def park(self, num_tokens: int) -> None:
        """The sequence leaves the batch with [0, num_tokens) computed: its state may move to host memory."""

    def unpark(self) -> None:
        """The sequence comes back, state as it was. Raises RequestFailed when there is no memory for it."""

    def free(self) -> None:
        """Drop the memory (exported views keep theirs). Idempotent."""


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """What a chunk left besides state: logprobs of prompt tokens start+1 .. stop when they were asked for."""

    prompt_logprobs: tuple[TokenLogprob, ...] = ()


class Executor(Protocol):
    """Runs forwards. `new_slot` may be called from any thread, the rest on the engine thread only.

    Attributes:
        takes_chunks: `decode` can compute a small chunk in the same forward.
        is_settled: the last `decode` took as long as others like it will (a first one may take longer).
    """

    facts: ModelInfo

    @property
    def takes_chunks(self) -> bool: ...

    @property
    def is_settled(self) -> bool: ...

    def new_slot(self, num_tokens: int) -> Slot:
        """State memory for a sequence of up to `num_tokens` tokens."""

    def slot_bytes(self, num_tokens: int) -> dict[str, int]:
        """What `new_slot` would hold, by layer kind."""

    def warm_up(self, max_rows: int) -> bool:
        """Do a piece of what makes the first decode steps of up to `max_rows` rows as quick as later ones.

        Called while there is nothing else to do; False: nothing is left.
        """

    def decode(self, rows: Sequence[seq.Sequence], chunk: seq.Chunk | None = None) -> list[Sampled]:
        """Compute the one uncomputed token of every row and sample the next, in the order given.

        With it the state of `chunk`, another sequence's, if `takes_chunks`; RequestFailed is about the chunk, and
        leaves the rows as they were.
        """

    def prefill(self, chunk: seq.Chunk, on_layer: Callable[[int], None]) -> ChunkResult:
        """Compute a chunk. `on_layer(n)` is called as soon as layer number n's rows are in the slot, in order of n."""
