"""Finds out what state a loaded model has, by running it: no list of model names anywhere.

transformers' own cache of a short forward tells each layer's kind and the shapes of its rows. A second forward through
our slots must then give the same logits; a model that needs anything our attention does not do is refused here, at
start-up. Called by the runner.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from common.errors import StartupError
from common.layout import Kind, StateLayout, StateSpec, TensorSpec

CARRIED = ("full_attention", "sliding_attention")
PROBE_TOKENS = (1, 5, 3, 8, 2, 7)
# Largest difference of logits, relative to their range, that other orders of summation may cause.
TOLERANCE = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.15, "int8": 0.3}


def probe(model: Any) -> tuple[DynamicCache, torch.Tensor]:
    """Forward of a few tokens with transformers' own cache and attention: the cache and the last logits.

    Raises:
        StartupError: a layer is of a kind that cannot be carried, or the model does not run.
    """
    config = model.config.get_text_config()
    for index, kind in enumerate(getattr(config, "layer_types", None) or ()):
        if kind not in CARRIED:
            raise StartupError(f"layer {index} is of type {kind}: its state cannot be carried.")
    ids = torch.tensor([[t % config.vocab_size for t in PROBE_TOKENS]], device=model.device)
    try:
        cache = DynamicCache(config=model.config)
        with torch.inference_mode():
            out = model(input_ids=ids, cache=cache, use_cache=True)
    except Exception as e:
        raise StartupError(f"this model does not run with transformers' own cache: {type(e).__name__}: {e}") from e
    return cache, out.logits[0, -1].float()


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


def layout_of(cache: DynamicCache, kv_dtype: str) -> StateLayout:
    """The state layout that a filled cache shows, with rows stored as `kv_dtype`.

    Raises:
        StartupError: a layer's state cannot be carried; names the layer.
    """
    states = []
    for index, layer in enumerate(cache.layers):
        rows: Any = layer
        kind, window = _kind_of(index, rows)
        shapes = [(t.shape[1], t.shape[3]) for t in (rows.keys, rows.values)]
        tensors = tuple(TensorSpec(name, shape, kv_dtype) for name, shape in zip(("k", "v"), shapes, strict=True))
        states.append(StateSpec(index, kind, tensors, window=window))
    return StateLayout(tuple(states))


def _kind_of(index: int, layer: Any) -> tuple[Kind, int]:
    if getattr(layer, "keys", None) is None or not layer.is_initialized:
        raise StartupError(
            f"layer {index} ({type(layer).__name__}) keeps no rows of its own: its state cannot be carried."
        )
    # Exactly these two: subclasses hold further state that would be lost.
    if type(layer) is DynamicSlidingWindowLayer:
        return "window", int(layer.sliding_window)
    if type(layer) is DynamicLayer:
        return "full", 0
    raise StartupError(f"layer {index} has state of type {type(layer).__name__}: it cannot be carried.")


def check_same(own: torch.Tensor, ours: Callable[[], torch.Tensor], dtypes: tuple[str, ...]) -> None:
    """Our path must agree with transformers' own logits [vocabulary] of the probe.

    Raises:
        StartupError: it does not, so this model does something we would silently get wrong.
    """
    try:
        found = ours()
    except Exception as e:
        raise StartupError(f"this model cannot run on our state layers: {type(e).__name__}: {e}") from e
    scale = float(own.max() - own.min()) or 1.0
    difference = float((own - found).abs().max()) / scale
    limit = max(TOLERANCE[d] for d in dtypes)
    if not difference <= limit:
        raise StartupError(
            f"our attention gives other logits than transformers for this model (relative difference {difference:.2g}, "
            f"limit {limit:g}); it needs something that is not supported."
        )
