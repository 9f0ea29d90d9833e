"""The torch engine: runs the forwards of a batch on slots (the Executor protocol of common/sched/executor.py).

Everything is derived from the loaded model. Knows no scheduler decisions, no event loop, no network. Built by a factory
on the engine thread; `load` is that factory's body.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from common.engine.attention import ATTENTION_NAME
from common.engine.chunk_attention import ChunkAttention
from common.engine.compiled import compile_parts
from common.engine.decode_rows import DecodeAttention
from common.engine.fixed import FixedBatch, FixedLayout, FixedRows
from common.engine.kernel_norm import accelerate_norms
from common.engine.kernels import accelerate, short_forward
from common.engine.latent import LatentWeights
from common.engine.loader import LoadedModel, load_model
from common.engine.memory import is_out_of_memory
from common.engine.probe import (
    PROBE_CHUNKS,
    PROBE_TOKENS,
    check_same,
    latent_modules,
    layout_of,
    probe,
    stable_context,
)
from common.engine.replay import (
    NUM_WARM_UP_STEPS,
    Replay,
    WarmUpStep,
    warm_up_kinds,
    warm_up_steps,
)
from common.engine.sampler import sample, token_logprobs
from common.engine.slot_cache import SlotCache, SlotContext, StateComplete, StateIndex
from common.engine.state import SlotState
from common.errors import EngineError, RequestFailed, StartupError
from common.layout import ModelInfo
from common.sched import sequence as seq
from common.sched.executor import ChunkResult, Sampled, Slot
from common.sched.specs import slot_bytes

log = logging.getLogger(__name__)

# A warm-up starts over as often, less one, as its recordings become useless meanwhile.
WARM_UP_ROUNDS = 3
# What rows may be stored as.
KV_DTYPES = ("float32", "bfloat16", "float16")
_PRODUCTS = {"torch": "torch", "exact": "our kernels", "int8": "our kernels, rounded to int8"}


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """How to compute.

    Attributes:
        kv_dtype: of rows; "" means as `dtype`.
        weights: "exact", "int8" or "torch"; `load` packs matrices by it, and "torch" does without kernels anywhere.
        compile: the parts without state by torch.compile; not with kernels.
        threads: 0 leaves torch's choice.
        room: largest chunk.
        parks: preempted sequences move to host memory (None: on devices with memory of their own).
    """

    device: str = "cpu"
    dtype: str = "float32"
    kv_dtype: str = ""
    weights: str = "exact"
    compile: bool = False
    threads: int = 0
    room: int = 256
    parks: bool | None = None


def load(path: Path, options: RunnerOptions) -> Runner:
    """Load a served model directory. Call on the engine thread: torch's thread count belongs to the calling thread.

    Raises:
        StartupError: the directory is damaged, the device is missing, or the model's state cannot be carried.
    """
    if options.threads:
        torch.set_num_threads(options.threads)
    loaded = load_model(path, device=options.device, dtype=options.dtype)
    products = "torch"
    if options.compile:
        compile_parts(loaded.model, short_forward)
    elif options.weights != "torch":
        products = _accelerate(loaded.model, options)
    return Runner(loaded, options, products)


def _accelerate(model: Any, options: RunnerOptions) -> str:
    """What computes products from now on: as `weights`, or "torch"."""
    weights = options.weights
    try:
        report = accelerate(model, weights="int8" if weights == "int8" else "float32")
    except EngineError as e:
        raise StartupError(f'{e}; engine.weights = "torch" does without') from e
    if report.reason and weights == "int8":
        raise StartupError(f'engine.weights = "int8" is not possible here: {report.reason}')
    if report.reason:
        told = f'engine.dtype = "{options.dtype}", and our kernels are for float32 on a CPU'
        reason = report.reason if options.dtype == "float32" else told
        log.warning("torch computes all products, slower than our kernels would: %s", reason)
        return "torch"
    formats = " ".join(f"{name}={num}" for name, num in sorted(report.formats.items()))
    before, after = report.bytes_before >> 20, report.bytes_after >> 20
    num_norms = accelerate_norms(model)
    log.info("matrices are packed %s before_mib=%d after_mib=%d norms=%d", formats, before, after, num_norms)
    return weights


class Runner:
    """Runs one model. `new_slot` may be called from any thread, the rest on the engine thread only."""

    facts: ModelInfo

    def __init__(self, loaded: LoadedModel, options: RunnerOptions, products: str = "torch") -> None:
        """`products`: what computes them, for the peer and people to see."""
        self._model, self._options = loaded.model, options
        self._device = torch.device(options.device)
        kv_dtype = options.kv_dtype or options.dtype
        if kv_dtype not in KV_DTYPES:
            raise StartupError(f"kv_dtype {kv_dtype!r} is not one of {', '.join(KV_DTYPES)}.")
        cache, logits = probe(self._model)
        latents = latent_modules(self._model)
        layout = layout_of(cache, kv_dtype, latents)
        self._index, self._fixed = StateIndex(layout), FixedLayout(layout)
        self._batch, self._replay = FixedBatch(self._fixed), Replay()
        if options.compile:
            self._replay.reason = "torch.compile does it"  # a recording would run the parts as they were before
        self._latents = {self._index.rows(layer): LatentWeights(module) for layer, module in latents.items()}
        self._layout, manifest = layout, loaded.manifest
        self._attention: DecodeAttention | None = None
        self._chunks: ChunkAttention | None = None
        if options.weights != "torch" and options.dtype == "float32" and self._device.type == "cpu":
            ranks = {number: weights.rank for number, weights in self._latents.items()}
            self._chunks = ChunkAttention.make()
            self._attention = DecodeAttention.make(layout, ranks, self._chunks)
        self.facts = ModelInfo(
            name=manifest.name,
            weights_digest=manifest.weights_digest,
            config_digest=manifest.config_digest,
            tokenizer_digest=manifest.tokenizer_digest,
            layout=layout,
            vocab_size=loaded.vocab_size,
            max_context=stable_context(self._model.config.get_text_config(), loaded.max_context),
            eos_token_ids=loaded.eos_token_ids,
            numerics=self._numerics(kv_dtype, products),
        )
        self._num_sampled = 0
        self._warming: Iterator[bool] | None = None
        self._model.set_attn_implementation(ATTENTION_NAME)
        if (output := self._model.get_output_embeddings()) is not None:
            output.register_forward_pre_hook(self._keep_sampled)
        check_same(logits, self._probe_slots, (options.dtype, kv_dtype))
        log.info("model %s keeps state: %s; products by %s", manifest.name, layout.summary, _PRODUCTS[products])

    def new_slot(self, num_tokens: int) -> SlotState:
        """State memory for up to `num_tokens`. Raises RequestFailed when there is none left."""
        try:
            parks = self._options.parks
            return SlotState(self._layout, num_tokens, self._options.room, self._device, self._fixed, parks=parks)
        except (RuntimeError, MemoryError) as e:
            raise RequestFailed(f"no memory for the state of {num_tokens} tokens: {e}") from e

    def slot_bytes(self, num_tokens: int) -> dict[str, int]:
        """What `new_slot` would hold, by layer kind."""
        return slot_bytes(self._layout, num_tokens, self._options.room)

    @property
    def takes_chunks(self) -> bool:
        """Whether a chunk's tokens can be further rows of a decode step: kernels attend, no state is recurrent."""
        return self._attention is not None and not self._fixed.num_bytes and not self._replay.reason

    @property
    def is_settled(self) -> bool:
        """Whether the last `decode` took as long as others like it will: it was not one that is recorded."""
        return self._replay.is_settled

    @torch.inference_mode()
    def decode(self, rows: Sequence[seq.Sequence], chunk: seq.Chunk | None = None) -> list[Sampled]:
        """Compute each row's last token and sample the next, in order; and the state of a chunk.

        Raises RequestFailed when the chunk's slot cannot take it: then nothing was computed.
        """
        if chunk is not None:
            [slot] = _own([chunk.seq.slot])
            slot.locate(chunk.start, chunk.stop)
        failed = _failed(rows)
        if failed:
            return self._decode_others(rows, failed, chunk)
        slots, starts = _own([row.slot for row in rows]), [row.num_computed_tokens for row in rows]
        ids = [[row.tokens[start]] for row, start in zip(rows, starts, strict=True)]
        if chunk is not None:
            slots += [slot] * (chunk.stop - chunk.start)
            starts += range(chunk.start, chunk.stop)
            ids += [[token] for token in chunk.seq.tokens[chunk.start : chunk.stop]]
        logits = self._row_logits(slots, starts, ids, len(rows))
        return sample(logits[: len(rows), -1], rows, self.facts.eos_token_ids)

    @torch.inference_mode()
    def warm_up(self, max_rows: int) -> bool:
        """Run a step on throwaway state, so that steps of up to `max_rows` rows are recorded; False: all are.

        Alone first, then with each size of a chunk in the same forward.
        """
        if self._warming is None:
            self._warming = self._warm_up(max_rows)
        return next(self._warming, False)

    def _warm_up(self, max_rows: int) -> Iterator[bool]:
        slots: list[SlotState] = []
        long: list[SlotState] = []  # the one of a chunk
        try:
            for step in self._warm_up_steps(max_rows):
                slots += [self.new_slot(NUM_WARM_UP_STEPS) for _ in range(step.num_rows - len(slots))]
                if step.num_chunk and step.starts[-step.num_chunk] == 0:  # rows of a window do not come back
                    _free(long)
                    long = [self.new_slot(NUM_WARM_UP_STEPS * step.num_chunk)]
                if step.num_chunk:
                    long[0].locate(step.starts[-step.num_chunk], step.starts[-1] + 1)  # as `decode` does
                rows = slots[: step.num_rows] + long * step.num_chunk
                self._row_logits(rows, step.starts, [[0]] * len(rows), step.num_rows, records=True)
                yield True
            log.info("decode steps are recorded programs=%d", self._replay.num_programs)
        except (RequestFailed, RuntimeError, MemoryError) as e:
            if not isinstance(e, RequestFailed) and not is_out_of_memory(e):
                raise
            log.warning("no memory to record decode steps before they are needed: %s", e)
        finally:
            _free(slots + long)
            if self._replay.reason:
                self._batch.clear()

    def _warm_up_steps(self, max_rows: int) -> Iterator[WarmUpStep]:
        # What was recorded is lost when more sequences than ever decode together meanwhile: then once more.
        for _ in range(WARM_UP_ROUNDS):
            max_chunk = self._options.room if self.takes_chunks else 0
            for num_rows, num_chunk in warm_up_kinds(max_rows, self._fixed.num_bytes, max_chunk):
                for step in warm_up_steps(num_rows, num_chunk):
                    if self._replay.reason:
                        return
                    if not self._is_recorded(num_rows, num_chunk):
                        yield step

    def _is_recorded(self, num_rows: int, num_chunk: int = 0) -> bool:
        memory = self._batch.memory if self._fixed.num_bytes else None
        return self._replay.is_recorded(num_rows, num_chunk, memory)

    def _row_logits(
        self,
        slots: list[SlotState],
        starts: list[int],
        ids: list[list[int]],
        num_sampled: int,
        *,
        records: bool = False,
    ) -> torch.Tensor:
        """Logits of the first `num_sampled` rows, [num_sampled, 1, vocab]; the others are one chunk."""
        context = self._rows_context(slots, starts, len(slots) - num_sampled)
        inputs = self._inputs(ids, context)
        self._num_sampled = context.num_sampled = num_sampled
        run = functools.partial(self._run, self._model, inputs, context)
        try:
            return self._replay.forward(context, inputs, lambda: run().logits, records=records)
        finally:
            self._num_sampled = 0

    def _decode_others(
        self, rows: Sequence[seq.Sequence], failed: dict[int, RequestFailed], chunk: seq.Chunk | None
    ) -> list[Sampled]:
        """`decode` without the rows that cannot go on."""
        others = [row for i, row in enumerate(rows) if i not in failed]
        done = iter(self.decode(others, chunk) if others else ())
        if not others and chunk is not None:
            self.prefill(chunk, lambda _layer: None)
        return [Sampled(-1, None, failed[i]) if i in failed else next(done) for i in range(len(rows))]

    def _keep_sampled(self, _module: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        """Only rows that sample go through the output layer."""
        num, hidden = self._num_sampled, args[0]
        return (hidden[:num],) if 0 < num < hidden.shape[0] else None

    @torch.inference_mode()
    def prefill(self, chunk: seq.Chunk, on_layer: Callable[[int], None]) -> ChunkResult:
        """Compute a chunk's state; logits only when prompt logprobs are wanted."""
        [slot] = _own([chunk.seq.slot])
        context = self._chunk_context(slot, chunk.start, chunk.stop)
        context.on_layer = on_layer
        ids = [chunk.seq.tokens[chunk.start : chunk.stop]]
        if chunk.has_logits:
            logits = self._forward(self._model, ids, context).logits[0]
            following = chunk.seq.tokens[chunk.start + 1 : chunk.stop + 1]
            return ChunkResult(tuple(token_logprobs(logits, following, chunk.seq.prompt_logprobs or 0)))
        context.stops_early = True
        with contextlib.suppress(StateComplete):
            self._forward(self._model.base_model, ids, context)
        return ChunkResult()

    @torch.inference_mode()
    def logits(self, chunk: seq.Chunk) -> torch.Tensor:
        """Compute a chunk's state; logits after each of its tokens, [tokens, vocab]."""
        [slot] = _own([chunk.seq.slot])
        context = self._chunk_context(slot, chunk.start, chunk.stop)
        found: torch.Tensor = self._forward(self._model, [chunk.seq.tokens[chunk.start : chunk.stop]], context).logits[
            0
        ]
        return found

    def _forward(self, model: Any, ids: list[list[int]], context: SlotContext) -> Any:
        """One forward over token ids [B, c]."""
        return self._run(model, self._inputs(ids, context), context)

    def _inputs(self, ids: list[list[int]], context: SlotContext) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids and positions, [B, c] each."""
        steps = torch.arange(context.length, device=self._device)
        positions = torch.tensor(context.starts, device=self._device)[:, None] + steps
        return torch.tensor(ids, device=self._device), positions

    def _run(self, model: Any, inputs: tuple[torch.Tensor, torch.Tensor], context: SlotContext) -> Any:
        input_ids, positions = inputs
        cache = SlotCache(context)
        out = model(input_ids=input_ids, position_ids=positions, cache=cache, use_cache=True, slot_context=context)
        cache.finish()
        return out

    def _rows_context(self, slots: list[SlotState], starts: list[int], num_chunk: int = 0) -> SlotContext:
        """For a batch of decode rows, the last `num_chunk` of which are one chunk."""
        context = SlotContext(self._index, slots, starts, 1, latents=self._latents)
        if self._attention is not None:
            context.rows = self._attention.rows(slots, starts, num_chunk)
        if self._fixed.num_bytes:
            for slot, start in zip(slots, starts, strict=True):
                if start == 0:
                    slot.fixed.zero_()
            context.fixed = self._batch.gather(slots)
        return context

    def _chunk_context(self, slot: SlotState, start: int, stop: int) -> SlotContext:
        """For a chunk of one sequence."""
        context = SlotContext(self._index, [slot], [start], stop - start, is_chunk=True, latents=self._latents)
        context.chunks = self._chunks
        if self._fixed.num_bytes:
            context.fixed = FixedRows(self._fixed, slot.fixed[None])
        return context

    @torch.inference_mode()
    def _probe_slots(self) -> torch.Tensor:
        """The probe's last logits through slots: chunks, then two decode rows at different positions."""
        ids = [t % self.facts.vocab_size for t in PROBE_TOKENS]
        slot, other = self.new_slot(len(ids)), self.new_slot(len(ids))
        for start, stop in PROBE_CHUNKS:
            self._forward(self._model.base_model, [ids[start:stop]], self._chunk_context(slot, start, stop))
        for step, start in enumerate(range(PROBE_CHUNKS[-1][1], len(ids))):
            context = self._rows_context([other, slot], [step, start])
            out = self._forward(self._model, [[ids[step]], [ids[start]]], context)
        self._batch.clear()
        logits: torch.Tensor = out.logits[1, -1].float()
        return logits

    def _numerics(self, kv_dtype: str, products: str) -> dict[str, str]:
        return {
            "engine": f"torch {torch.__version__}",
            "device": self._device.type,
            "dtype": self._options.dtype,
            "kv_dtype": kv_dtype,
            "weights": products,
            "compile": str(self._options.compile).lower(),
            "threads": str(torch.get_num_threads()),
            "vectors": torch.backends.cpu.get_cpu_capability(),
        }


def _failed(rows: Sequence[seq.Sequence]) -> dict[int, RequestFailed]:
    """Rows whose slot was freed, or cannot take a token for lack of memory, by index."""
    failed = {}
    for i, (slot, row) in enumerate(zip(_own([row.slot for row in rows]), rows, strict=True)):
        try:
            slot.locate(row.num_computed_tokens)
        except RequestFailed as error:
            failed[i] = error
    return failed


def _free(slots: list[SlotState]) -> None:
    for slot in slots:
        slot.free()


def _own(slots: list[Slot]) -> list[SlotState]:
    own = [slot for slot in slots if isinstance(slot, SlotState)]
    if len(own) != len(slots):
        raise TypeError("this engine runs on its own slots only")
    return own
