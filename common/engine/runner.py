"""The torch engine: runs the forwards of a batch on slots (the Executor protocol of common/sched/executor.py).

Everything is derived from the loaded model. Knows no scheduler decisions, no event loop, no network. Built by a factory
on the engine thread; `load` is that factory's body.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from common.engine.attention import ATTENTION_NAME, SlotCache, SlotContext, StateComplete
from common.engine.loader import LoadedModel, load_model
from common.engine.probe import PROBE_TOKENS, check_same, layout_of, probe, stable_context
from common.engine.sampler import sample, token_logprobs
from common.engine.state import DTYPES, SlotState
from common.errors import RequestFailed, StartupError
from common.layout import ModelInfo
from common.sched import sequence as seq
from common.sched.executor import ChunkResult, Sampled, Slot
from common.sched.specs import slot_bytes


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """How to compute. `kv_dtype` "" means as `dtype`; `threads` 0 leaves torch's choice; `room`: largest chunk."""

    device: str = "cpu"
    dtype: str = "float32"
    kv_dtype: str = ""
    threads: int = 0
    room: int = 256


def load(path: Path, options: RunnerOptions) -> Runner:
    """Load a served model directory. Call on the engine thread: torch's thread count belongs to the calling thread.

    Raises:
        StartupError: the directory is damaged, the device is missing, or the model's state cannot be carried.
    """
    if options.threads:
        torch.set_num_threads(options.threads)
    return Runner(load_model(path, device=options.device, dtype=options.dtype), options)


class Runner:
    """Runs one model. `new_slot` may be called from any thread, the rest on the engine thread only."""

    facts: ModelInfo

    def __init__(self, loaded: LoadedModel, options: RunnerOptions) -> None:
        self._model, self._options = loaded.model, options
        self._device = torch.device(options.device)
        kv_dtype = options.kv_dtype or options.dtype
        if kv_dtype not in DTYPES:
            raise StartupError(f"kv_dtype {kv_dtype!r} is not one of {', '.join(DTYPES)}.")
        cache, logits = probe(self._model)
        layout = layout_of(cache, kv_dtype)
        self._number_of = {spec.layer: number for number, spec in enumerate(layout.states)}
        self._layout, manifest = layout, loaded.manifest
        self.facts = ModelInfo(
            name=manifest.name,
            weights_digest=manifest.weights_digest,
            config_digest=manifest.config_digest,
            tokenizer_digest=manifest.tokenizer_digest,
            layout=layout,
            vocab_size=loaded.vocab_size,
            max_context=stable_context(self._model.config.get_text_config(), loaded.max_context),
            eos_token_ids=loaded.eos_token_ids,
            numerics=self._numerics(kv_dtype),
        )
        self._model.set_attn_implementation(ATTENTION_NAME)
        check_same(logits, self._probe_slots, (options.dtype, kv_dtype))

    def new_slot(self, num_tokens: int) -> SlotState:
        """State memory for up to `num_tokens`. Raises RequestFailed when there is none left."""
        try:
            return SlotState(self._layout, num_tokens, self._options.room, self._device)
        except (RuntimeError, MemoryError) as e:
            raise RequestFailed(f"no memory for the state of {num_tokens} tokens: {e}") from e

    def slot_bytes(self, num_tokens: int) -> dict[str, int]:
        """What `new_slot` would hold, by layer kind."""
        return slot_bytes(self._layout, num_tokens, self._options.room)

    @torch.inference_mode()
    def decode(self, rows: Sequence[seq.Sequence]) -> list[Sampled]:
        """Compute each row's last token and sample the next, in order."""
        starts = [row.num_computed_tokens for row in rows]
        ids = [[row.tokens[start]] for row, start in zip(rows, starts, strict=True)]
        context = self._context([row.slot for row in rows], starts, 1)
        logits = self._forward(self._model, ids, context).logits[:, -1]
        return sample(logits, rows, self.facts.eos_token_ids)

    @torch.inference_mode()
    def prefill(self, chunk: seq.Chunk, on_layer: Callable[[int], None]) -> ChunkResult:
        """Compute a chunk's state; logits only when prompt logprobs are wanted."""
        context = self._context([chunk.seq.slot], [chunk.start], chunk.stop - chunk.start)
        context.on_layer = on_layer
        ids = [chunk.seq.tokens[chunk.start : chunk.stop]]
        if chunk.has_logits:
            logits = self._forward(self._model, ids, context).logits[0]
            following = chunk.seq.tokens[chunk.start + 1 : chunk.stop + 1]
            return ChunkResult(tuple(token_logprobs(logits, following, chunk.seq.prompt_logprobs or 0)))
        context.stops_at = len(self._layout.states) - 1
        with contextlib.suppress(StateComplete):
            self._forward(self._model.base_model, ids, context)
        return ChunkResult()

    def _forward(self, model: Any, ids: list[list[int]], context: SlotContext) -> Any:
        """One forward over token ids [B, c]."""
        input_ids = torch.tensor(ids, device=self._device)
        steps = torch.arange(context.length, device=self._device)
        positions = torch.tensor(context.starts, device=self._device)[:, None] + steps
        return model(
            input_ids=input_ids,
            position_ids=positions,
            cache=SlotCache(context),
            use_cache=True,
            slot_context=context,
        )

    def _context(self, slots: list[Slot], starts: list[int], length: int) -> SlotContext:
        own = [slot for slot in slots if isinstance(slot, SlotState)]
        if len(own) != len(slots):
            raise TypeError("this engine runs on its own slots only")
        return SlotContext(self._layout.states, self._number_of, own, starts, length)

    @torch.inference_mode()
    def _probe_slots(self) -> torch.Tensor:
        """The probe's last logits through slots: two chunks and a decode row."""
        ids = [t % self.facts.vocab_size for t in PROBE_TOKENS]
        slot = self.new_slot(len(ids))
        for start, stop in ((0, 3), (3, 5)):
            self._forward(self._model.base_model, [ids[start:stop]], self._context([slot], [start], stop - start))
        out = self._forward(self._model, [ids[5:]], self._context([slot], [5], 1))
        logits: torch.Tensor = out.logits[0, -1].float()
        return logits

    def _numerics(self, kv_dtype: str) -> dict[str, str]:
        return {
            "engine": f"torch {torch.__version__}",
            "device": self._device.type,
            "dtype": self._options.dtype,
            "kv_dtype": kv_dtype,
            "threads": str(torch.get_num_threads()),
        }
