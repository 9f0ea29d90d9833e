"""One sequence in the engine: tokens, and how many of them have their state computed.

There are no phases: `num_computed_tokens` catches up with the tokens. A sequence that samples leaves its last token to
the decode batch; a prefill job (`sampling` is None) is done when every token is computed. Knows no tensors.

    tokens    [ computed state ........ | uncomputed .......... | last token ]
    chunks                                num_remaining            decode row (only when sampling)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

from common.errors import RequestFailed
from common.request import SamplingParams, TokenLogprob

if TYPE_CHECKING:
    from common.sched.executor import Slot


@dataclass(slots=True, eq=False)
class Sequence:
    """Counters and inputs of one sequence; `owner` is whoever gets its outputs (never looked into here).

    Attributes:
        seq_id: order of arrival, unique.
        priority: larger goes first among those that need chunks, but never starves the oldest.
        arrived_at, due_at: instants of one clock; its prompt is late if it is not computed by then, inf: never.
        start: a prefill job's first row to send; the receiver holds [0, start).
        is_held: not to be scheduled now: its state comes from elsewhere, or its consumer is behind.
        last_turn: number of the turn in which it last got a chunk; 0 before the first.
        split_at: a chunk ends there, if the prompt is still before it: others may go on from that point.
        keeps_state: its state is offered to the prefix cache; up to `num_offered` it was, `point_at` was the last point
            at which another sequence can go on.
        has_run, is_parked: it has decoded in a batch; it was put aside for others of higher priority.
        siblings: further choices of the same prompt, forked from this sequence when the prompt is computed.
    """

    seq_id: int
    owner: object
    tokens: list[int]
    slot: Slot
    sampling: SamplingParams | None = None
    choice: int = 0
    seed: int = 0
    start: int = 0
    priority: int = 0
    arrived_at: float = 0.0
    due_at: float = inf
    prompt_logprobs: int | None = None
    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    is_held: bool = False
    last_turn: int = 0
    split_at: int = 0
    keeps_state: bool = False
    num_offered: int = 0
    point_at: int = 0
    has_run: bool = False
    is_parked: bool = False
    siblings: list[Sequence] = field(default_factory=list)
    prompt_entries: list[TokenLogprob | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = self.num_prompt_tokens or len(self.tokens)

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far."""
        return len(self.tokens)

    @property
    def num_output_tokens(self) -> int:
        """Sampled tokens so far."""
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def num_remaining(self) -> int:
        """Uncomputed tokens that only chunks compute."""
        return len(self.tokens) - (self.sampling is not None) - self.num_computed_tokens


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [start, stop) of one sequence, computed in one forward. Logits of every position if `has_logits`."""

    seq: Sequence
    start: int
    stop: int

    @property
    def has_logits(self) -> bool:
        """Whether prompt logprobs are wanted, so that every position needs its logits."""
        return self.seq.prompt_logprobs is not None

    @property
    def is_final(self) -> bool:
        """Whether the sequence's chunks end here."""
        return self.stop == self.seq.num_computed_tokens + self.seq.num_remaining


@dataclass(frozen=True, slots=True)
class Batch:
    """One engine step: the decode rows first, then at most one chunk of another sequence.

    `failed` are sequences that could not come back into the batch, with the reason.
    """

    rows: tuple[Sequence, ...]
    chunk: Chunk | None
    failed: tuple[tuple[Sequence, RequestFailed], ...] = ()
