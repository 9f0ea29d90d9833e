"""The tiny hybrid model through transformers' own forward in this process, by chunks, with state spoilt on request.

Called by evaluate.py and tests; knows neither our engine nor HTTP.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.models.kimi_linear import KimiLinearForCausalLM

from benchmarks.tiny_hybrid import task

CHUNK_TOKENS = 64


def _recurrent(cache: DynamicCache) -> None:
    for layer in cache.layers:
        if hasattr(layer, "recurrent_states"):
            layer.recurrent_states[0].zero_()


def _latent(cache: DynamicCache) -> None:
    for layer in cache.layers:
        if not hasattr(layer, "recurrent_states"):
            layer.keys.zero_()
            layer.values.zero_()


def _one_chunk_of_latents(cache: DynamicCache) -> None:
    """A chunk in the middle, where half of the facts have been said."""
    for layer in cache.layers:
        if not hasattr(layer, "recurrent_states"):
            start = layer.keys.shape[-2] // 3 // CHUNK_TOKENS * CHUNK_TOKENS
            layer.keys[..., start : start + CHUNK_TOKENS, :] = 0
            layer.values[..., start : start + CHUNK_TOKENS, :] = 0


def _first_recurrent(cache: DynamicCache) -> None:
    cache.layers[0].recurrent_states[0].zero_()


def _bfloat16_recurrent(cache: DynamicCache) -> None:
    for layer in cache.layers:
        if hasattr(layer, "recurrent_states"):
            layer.recurrent_states[0].copy_(layer.recurrent_states[0].bfloat16())


# What is done to the cache at the last chunk boundary before the question; SKIPPED happens while it is filled.
SKIPPED = "recurrent state skips one chunk"
SPOILERS: dict[str, Callable[[DynamicCache], None] | None] = {
    "nothing": None,
    "recurrent state zeroed": _recurrent,
    "recurrent state of the first layer zeroed": _first_recurrent,
    SKIPPED: None,
    "recurrent state rounded to bfloat16": _bfloat16_recurrent,
    "latents zeroed": _latent,
    "one chunk of latents zeroed": _one_chunk_of_latents,
}


class LocalAnswerer:
    """Greedy answers of a model directory or of a model in memory; see SPOILERS for `spoilt`."""

    def __init__(self, model: Path | KimiLinearForCausalLM, spoilt: str = "nothing") -> None:
        self._model = AutoModelForCausalLM.from_pretrained(model) if isinstance(model, Path) else model
        self._model.eval()
        self._spoilt = spoilt

    @torch.inference_mode()
    def __call__(self, prompt: list[str]) -> list[str]:
        """The words of the answer, at most ANSWER_WORDS of them."""
        ids = torch.tensor([task.ids_of(prompt)])
        boundary = (ids.shape[1] - 2) // CHUNK_TOKENS * CHUNK_TOKENS
        cache = self.prefill(ids[:, :boundary])
        if (spoil := SPOILERS[self._spoilt]) is not None:
            spoil(cache)
        words: list[str] = []
        step = ids[:, boundary:]
        while len(words) < task.ANSWER_WORDS:
            logits = self._model(input_ids=step, cache=cache, use_cache=True).logits[:, -1]
            step = logits.argmax(-1, keepdim=True)
            words.append(task.WORDS[step.item()])
            if words[-1] == task.END:
                break
        return words

    def prefill(self, ids: torch.Tensor) -> DynamicCache:
        """The state after `ids` [1, length], computed in chunks."""
        cache = DynamicCache(config=self._model.config)
        chunks = ids.split(CHUNK_TOKENS, dim=1) if ids.shape[1] else ()
        for n, chunk in enumerate(chunks):
            kept = self._recurrent_states(cache) if self._spoilt == SKIPPED and n == len(chunks) // 3 else None
            self._model(input_ids=chunk, cache=cache, use_cache=True, logits_to_keep=1)
            for layer, state in kept or ():
                cache.layers[layer].recurrent_states[0].copy_(state)
        return cache

    @staticmethod
    def _recurrent_states(cache: DynamicCache) -> list[tuple[int, torch.Tensor]]:
        return [
            (n, layer.recurrent_states[0].clone())
            for n, layer in enumerate(cache.layers)
            if hasattr(layer, "recurrent_states") and layer.recurrent_states[0] is not None
        ]
