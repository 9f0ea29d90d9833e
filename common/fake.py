"""A fake engine: set speeds and state sizes, no weights. Its tokens follow from the state it holds.

Every state row is derived from (token, position, layer), the next token from every row that attention would read, so
state that is missing, stale or misplaced gives other tokens. Rows look random, so codecs see a worst case. It is an
Executor (common/sched/executor.py); numpy only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from common.errors import RequestFailed
from common.layout import ModelInfo, StateLayout, StateSpec, TensorSpec
from common.request import TokenLogprob
from common.sched import sequence as seq
from common.sched.executor import ChunkResult, Sampled, Slot
from common.sched.specs import slot_bytes, slot_rows

U64 = npt.NDArray[np.uint64]
EOS_TOKEN_ID = 2
_WORD = 8


@dataclass(frozen=True, slots=True)
class FakeOptions:
    """Speeds (tokens per second; decode per sequence, whatever the batch) and sizes; 0 means "no time at all".

    `num_layers` full layers are followed by `window_layers` layers of `window` tokens; both hold `num_heads` x
    `head_dim` values of `kv_dtype` twice. `room` is the chunk size.
    """

    prefill_tokens_per_s: float = 2000.0
    decode_tokens_per_s: float = 50.0
    num_layers: int = 8
    num_heads: int = 2
    head_dim: int = 64
    window_layers: int = 0
    window: int = 512
    kv_dtype: str = "float32"
    vocab_size: int = 32000
    max_context: int = 32768
    room: int = 256

    def layout(self) -> StateLayout:
        """The state layout of the pretended model."""
        shape = (self.num_heads, self.head_dim)
        tensors = (TensorSpec("k", shape, self.kv_dtype), TensorSpec("v", shape, self.kv_dtype))
        total = self.num_layers + self.window_layers
        return StateLayout(
            tuple(
                StateSpec(n, "full", tensors)
                if n < self.num_layers
                else StateSpec(n, "window", tensors, window=self.window)
                for n in range(total)
            )
        )


class FakeSlot:
    """State rows as bytes: per layer, per tensor an array [rows, row_bytes]; row 0 is token `base` of its layer."""

    def __init__(self, layout: StateLayout, num_tokens: int, room: int) -> None:
        self._layout, self._room, self._num_tokens = layout, room, num_tokens
        self._rows = [[self._buffer(s, n) for n in range(len(s.tensors))] for s in layout.states]
        self._base = [0] * len(layout.states)

    @property
    def num_bytes(self) -> dict[str, int]:
        """Memory held, by layer kind."""
        return slot_bytes(self._layout, self._num_tokens, self._room) if self._rows else {}

    def prepare_import(self, num_tokens: int) -> None:
        """Rows up to `num_tokens` will be written from outside."""
        self._base = [s.needed_from(num_tokens) for s in self._layout.states]

    def writable(self, start: int, stop: int, layers: tuple[int, ...]) -> tuple[memoryview, ...]:
        """Memory for rows [start, stop). Raises RequestFailed when freed or out of range."""
        return tuple(part.reshape(-1).data for part in self._parts(start, stop, layers))

    def landed(self, start: int, stop: int, layers: tuple[int, ...]) -> None:
        """Nothing to do: the bytes are where they belong."""

    def exported(self, start: int, stop: int, layers: tuple[int, ...]) -> tuple[memoryview, ...]:
        """Read-only views of computed rows."""
        return tuple(part.reshape(-1).data.toreadonly() for part in self._parts(start, stop, layers))

    def first_row(self, layers: tuple[int, ...]) -> int:
        """The first token whose rows are still there."""
        return max((self._base[n] for n in layers), default=0)

    def copy_from(self, source: Slot, num_tokens: int) -> None:
        """Become a copy of another fake slot."""
        if not isinstance(source, FakeSlot):
            raise TypeError(f"cannot copy a {type(source).__name__}")
        self._rows = [[t.copy() for t in layer] for layer in source._rows]
        self._base = list(source._base)

    def park(self, num_tokens: int) -> None:
        """Nothing moves."""

    def unpark(self) -> None:
        """Nothing moved."""

    def free(self) -> None:
        """Drop the memory."""
        self._rows = []

    def write(self, layer: int, start: int, rows: U64) -> None:
        """Put rows of words [c, row words of all tensors] at token `start`; a full window buffer is replaced."""
        spec, stop = self._layout.states[layer], start + len(rows)
        if stop - self._base[layer] > len(self._rows[layer][0]):
            self._slide(layer, spec, start)
        column = 0
        for tensor, buffer in zip(spec.tensors, self._rows[layer], strict=True):
            words = tensor.row_bytes // _WORD
            base = self._base[layer]
            buffer[start - base : stop - base] = rows[:, column : column + words].view(np.uint8)
            column += words

    def words(self, layer: int, stop: int) -> U64:
        """First word of every tensor's rows that attention at `stop` reads: [rows, tensors]."""
        first = self._layout.states[layer].needed_from(stop)
        base = self._base[layer]
        return np.stack(
            [b[first - base : stop - base, :_WORD].copy().view(np.uint64)[:, 0] for b in self._rows[layer]], 1
        )

    def _slide(self, layer: int, spec: StateSpec, position: int) -> None:
        """Exported views keep the old buffer, so it is never moved within itself."""
        first, base = spec.needed_from(position), self._base[layer]
        for n, old in enumerate(self._rows[layer]):
            new = self._buffer(spec, n)
            new[: position - first] = old[first - base : position - base]
            self._rows[layer][n] = new
        self._base[layer] = first

    def _buffer(self, spec: StateSpec, tensor: int) -> npt.NDArray[np.uint8]:
        rows = slot_rows(spec, self._num_tokens, self._room)
        return np.empty((rows, spec.tensors[tensor].row_bytes), np.uint8)

    def _parts(self, start: int, stop: int, layers: tuple[int, ...]) -> list[npt.NDArray[np.uint8]]:
        rows = self._rows
        if not rows:
            raise RequestFailed("the sequence is gone, and its state memory with it")
        parts: list[npt.NDArray[np.uint8]] = []
        for layer in layers:
            first, last = start - self._base[layer], stop - self._base[layer]
            if not 0 <= first < last <= len(rows[layer][0]):
                raise RequestFailed(f"rows [{start}, {stop}) of layer {layer} are outside the slot")
            parts += [buffer[first:last] for buffer in rows[layer]]
        return parts


class FakeExecutor:
    """Pretends to compute, at the speeds it was given. `clock` and `sleep` may be replaced in tests."""

    def __init__(
        self,
        options: FakeOptions,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.options, self._clock, self._sleep = options, clock, sleep
        self.takes_chunks, self.is_settled = False, True
        layout = options.layout()
        self.facts = ModelInfo(
            name="fake",
            weights_digest=layout.digest,
            config_digest=layout.digest,
            tokenizer_digest="fake",
            layout=layout,
            vocab_size=options.vocab_size,
            max_context=options.max_context,
            eos_token_ids=(EOS_TOKEN_ID,),
            numerics={"engine": "fake", "device": "cpu", "dtype": options.kv_dtype, "kv_dtype": options.kv_dtype},
        )
        self._words = [sum(t.row_bytes for t in s.tensors) // _WORD for s in layout.states]
        self._noise = np.random.default_rng(0).integers(0, 2**63, max(self._words), np.uint64)

    def new_slot(self, num_tokens: int) -> FakeSlot:
        """State memory for a sequence of up to `num_tokens`."""
        return FakeSlot(self.facts.layout, num_tokens, self.options.room)

    def slot_bytes(self, num_tokens: int) -> dict[str, int]:
        """What `new_slot` would hold."""
        return slot_bytes(self.facts.layout, num_tokens, self.options.room)

    def warm_up(self, max_rows: int) -> bool:
        """Nothing: the first step takes as long as the next."""
        return False

    def decode(self, rows: Sequence[seq.Sequence], chunk: seq.Chunk | None = None) -> list[Sampled]:
        """One token per row; takes 1 / decode_tokens_per_s for all of them."""
        started_at = self._clock()
        out = [self._decode_row(row) for row in rows]
        if self.options.decode_tokens_per_s:
            self._sleep_until(started_at + 1 / self.options.decode_tokens_per_s)
        return out

    def prefill(self, chunk: seq.Chunk, on_layer: Callable[[int], None]) -> ChunkResult:
        """Write a chunk's rows layer by layer, each taking its share of the time."""
        started_at, tokens = self._clock(), chunk.seq.tokens
        speed, num_layers = self.options.prefill_tokens_per_s, len(self._words)
        layer_s = (chunk.stop - chunk.start) / speed / num_layers if speed else 0.0
        for layer in range(num_layers):
            self._write(chunk.seq, layer, chunk.start, chunk.stop)
            if layer_s:
                self._sleep_until(started_at + (layer + 1) * layer_s)
            on_layer(layer)
        if not chunk.has_logits:
            return ChunkResult()
        num_top = chunk.seq.prompt_logprobs or 0
        return ChunkResult(tuple(self._logprob(tokens[p + 1], num_top) for p in range(chunk.start, chunk.stop)))

    def _write(self, sequence: seq.Sequence, layer: int, start: int, stop: int) -> None:
        slot = sequence.slot
        if not isinstance(slot, FakeSlot):
            raise TypeError(f"a fake engine cannot use a {type(slot).__name__}")
        tokens = np.array(sequence.tokens[start:stop], np.uint64)
        keys = _mix(tokens + np.arange(start, stop, dtype=np.uint64) * np.uint64(1 << 20) + np.uint64(layer << 52))
        slot.write(layer, start, keys[:, None] ^ self._noise[None, : self._words[layer]])

    def _decode_row(self, sequence: seq.Sequence) -> Sampled:
        position, sampling, slot = sequence.num_tokens, sequence.sampling, sequence.slot
        if sampling is None or not isinstance(slot, FakeSlot):
            raise TypeError("a decode row samples from a fake slot")
        for layer in range(len(self._words)):
            self._write(sequence, layer, position - 1, position)
        key = np.uint64(position)
        for layer in range(len(self._words)):
            words = slot.words(layer, position)
            # A sum over positions of words that already depend on the position: order needs no extra care.
            key = _mix(np.array([key ^ np.bitwise_xor.reduce(_mix(words), axis=None)]))[0]
        if sampling.temperature > 0:
            key = _mix(np.array([key ^ np.uint64(sequence.seed % 2**63) ^ np.uint64(sequence.choice << 32)]))[0]
        biased = [t for t, bias in sampling.logit_bias if bias >= 100]
        token = biased[0] if biased else _ordinary(int(key), self.options.vocab_size)
        if token == EOS_TOKEN_ID and sequence.num_output_tokens < sampling.min_tokens:
            token = _ordinary(int(key), self.options.vocab_size)
        logprob = self._logprob(token, sampling.logprobs) if sampling.logprobs is not None else None
        return Sampled(token, logprob)

    def _logprob(self, token: int, num_top: int) -> TokenLogprob:
        best = -0.5 - (token % 7) / 10
        return TokenLogprob(
            token, best, tuple(((token + n) % self.options.vocab_size, best - n) for n in range(num_top))
        )

    def _sleep_until(self, instant: float) -> None:
        wait_s = instant - self._clock()
        if wait_s > 0:
            self._sleep(min(wait_s, _LONGEST_S))


# Clocks of operating systems take no more than some years.
_LONGEST_S = 1e6


def _mix(words: U64) -> U64:
    """splitmix64's finaliser: every input bit reaches every output bit."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _ordinary(key: int, vocab_size: int) -> int:
    """A token id that is neither of the first three, so that nothing ends by chance."""
    return 3 + key % (vocab_size - 3)
