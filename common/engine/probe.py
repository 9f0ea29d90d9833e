"""Finds out what state a loaded model has, by running it: no list of model names anywhere.

transformers' own cache of a short forward tells each layer's kind and the shapes of its rows. A second forward through
our slots must then give the same logits; a model that needs anything our attention does not do is refused here, at
start-up. Called by the runner.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from transformers.cache_utils import (
    DummyLayer,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from common.engine.kernels import relative_difference
from common.engine.latent import is_latent
from common.engine.slot_cache import CONV, RECURRENT
from common.errors import StartupError
from common.layout import StateLayout, StateSpec, TensorSpec

CARRIED = {
    DummyLayer,  # a layer without state
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
}
# Two chunks longer than usual convolutions, a chunk of one token, decode rows.
PROBE_TOKENS = (1, 5, 3, 8, 2, 7, 4, 9, 6, 11, 5, 3, 10, 2, 8, 7)
PROBE_CHUNKS = ((0, 6), (6, 13), (13, 14))
# Largest difference of logits, relative to their range, that other orders of summation may cause.
TOLERANCE = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.15, "int8": 0.3}


def probe(model: Any) -> tuple[DynamicCache, torch.Tensor]:
    """Forward of a few tokens with transformers' own cache and attention: the cache and the last logits.

    Raises:
        StartupError: the model does not run with the cache that its configuration asks for.
    """
    config = model.config.get_text_config()
    ids = torch.tensor([[t % config.vocab_size for t in PROBE_TOKENS]], device=model.device)
    try:
        cache = DynamicCache(config=model.config)
        with torch.inference_mode():
            out = model(input_ids=ids, cache=cache, use_cache=True)
    except Exception as e:
        raise StartupError(f"this model does not run with transformers' own cache: {type(e).__name__}: {e}") from e
    return cache, out.logits[0, -1].float()


def latent_modules(model: Any) -> dict[int, Any]:
    """The modules that attend over compressed rows, by layer."""
    return {m.layer_idx: m for m in model.modules() if is_latent(m) and hasattr(m, "layer_idx")}


def stable_context(config: Any, max_context: int) -> int:
    """The longest context in which a token's rotation does not depend on how long the sequence has become.

    `longrope` switches all frequencies past the original length, for every row of a batch at once.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    for each in (parameters, *(v for v in parameters.values() if isinstance(v, dict))):
        if each.get("rope_type") == "longrope":
            original = each.get("original_max_position_embeddings") or config.original_max_position_embeddings
            max_context = min(max_context, int(original))
    return max_context


def layout_of(cache: DynamicCache, kv_dtype: str, latent_layers: Collection[int] = ()) -> StateLayout:
    """The state layout that a filled cache shows, with rows stored as `kv_dtype`, recurrent states as they are.

    Raises:
        StartupError: a layer's state cannot be carried; names the layer.
    """
    states: list[StateSpec] = []
    for index, layer in enumerate(cache.layers):
        # Exactly these: other subclasses hold further state that would be lost.
        if type(layer) not in CARRIED:
            raise StartupError(f"layer {index} has state of type {type(layer).__name__}: it cannot be carried.")
        if isinstance(layer, LinearAttentionLayer):
            states += _recurrent(index, layer)
        if isinstance(layer, DynamicLayer):
            states.append(_rows(index, layer, kv_dtype, is_latent=index in latent_layers))
    if not states:
        raise StartupError("this model keeps no state between tokens that its cache would show.")
    return StateLayout(tuple(states))


def _recurrent(index: int, layer: Any) -> list[StateSpec]:
    named = [(f"{CONV}{i}", t) for i, t in layer.conv_states.items()]
    named += [(f"{RECURRENT}{i}", t) for i, t in layer.recurrent_states.items()]
    found = [(name, t) for name, t in named if t is not None]
    if not found:
        raise StartupError(f"layer {index} ({type(layer).__name__}) shows no state: it cannot be carried.")
    tensors = tuple(TensorSpec(n, tuple(t.shape[1:]), str(t.dtype).removeprefix("torch.")) for n, t in found)
    return [StateSpec(index, "recurrent", tensors)]


def _rows(index: int, layer: Any, kv_dtype: str, *, is_latent: bool) -> StateSpec:
    if getattr(layer, "keys", None) is None or not layer.is_initialized:
        raise StartupError(
            f"layer {index} ({type(layer).__name__}) keeps no rows of its own: its state cannot be carried."
        )
    window = int(layer.sliding_window) if isinstance(layer, DynamicSlidingWindowLayer) else 0
    shapes = [(t.shape[1], t.shape[3]) for t in (layer.keys, layer.values)]
    if is_latent:
        if window:
            raise StartupError(f"layer {index} attends over latents in a window: it cannot be carried.")
        row = (shapes[0][0], shapes[0][1] + shapes[1][1])
        return StateSpec(index, "latent", (TensorSpec("latent", row, kv_dtype),))
    tensors = tuple(TensorSpec(name, shape, kv_dtype) for name, shape in zip(("k", "v"), shapes, strict=True))
    return StateSpec(index, "window" if window else "full", tensors, window=window)


def check_same(own: torch.Tensor, ours: Callable[[], torch.Tensor], dtypes: tuple[str, ...]) -> None:
    """Our path must agree with transformers' own logits [vocabulary] of the probe.

    Raises:
        StartupError: it does not, so this model does something we would silently get wrong.
    """
    try:
        found = ours()
    except Exception as e:
        raise StartupError(f"this model cannot run on our state layers: {type(e).__name__}: {e}") from e
    difference = relative_difference(own, found)
    limit = max(TOLERANCE[d] for d in dtypes)
    if not difference <= limit:
        raise StartupError(
            f"our attention gives other logits than transformers for this model (relative difference {difference:.2g}, "
            f"limit {limit:g}); it needs something that is not supported."
        )
