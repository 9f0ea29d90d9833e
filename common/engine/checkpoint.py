"""Whether a checkpoint is the one that its configuration describes: sizes that can be, no tensor left over, floats
where the model has floats.

transformers drops what it has no place for and casts what has another type; either serves a model that nobody trained.
Called by the loader (so by import and start-up alike), the importer's sources and nothing else. Knows no network.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from common.engine.safefile import SafeFile, TensorEntry
from common.errors import StartupError

# Under the names that transformers gives them; a configuration may have its own, such as n_layer.
SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
NOT_FLOATING = {"BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64"}
SHOWN = 3
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blk|blocks)\.(\d+)\.")
# A bias that the configuration switches off: part of the tensor's name, key.
_SWITCHES = ((re.compile(r"attn.*\.bias$"), "attention_bias"), (re.compile(r"mlp.*\.bias$"), "mlp_bias"))


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises StartupError naming the file when there is none."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise StartupError(f"{path} cannot be read: {error}.") from error
    if not isinstance(value, dict):
        raise StartupError(f"{path} does not hold a JSON object.")
    return value


def check_settings(label: str, config: Mapping[str, Any]) -> None:
    """Refuse a config.json with sizes that no model has, or of a quantised checkpoint. `label` begins the message.

    Raises StartupError naming key and value.
    """
    if (quantised := config.get("quantization_config")) is not None:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        raise StartupError(
            f"{label}: quantization_config {method!r}: quantised checkpoints are not supported; import the model's "
            f"unquantised weights (float32, bfloat16 or float16) or a GGUF file; engine.weights packs them here."
        )
    for prefix, part in (("", config), ("text_config.", config.get("text_config"))):
        if isinstance(part, Mapping):
            for key in size_keys(str(part.get("model_type"))):
                value = part.get(key)
                if value is None or isinstance(value, list):  # a list has one for each layer
                    continue
                if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
                    raise StartupError(f"{label}: {prefix}{key} is {value!r}, it must be a positive integer.")


def size_keys(model_type: str) -> list[str]:
    """SIZES and the names that this type of model has for them."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    own = CONFIG_MAPPING[model_type].attribute_map if model_type in CONFIG_MAPPING else {}
    return list(dict.fromkeys((*SIZES, *(own[name] for name in SIZES if name in own))))


def check_tensors(path: Path, model: Any, unexpected: Collection[str]) -> None:
    """Refuse tensors that the loaded `model` has no place for, and integers where it has floats.

    `unexpected`: what transformers reports, without what the model's class declares ignorable.
    Raises StartupError naming the tensors, and the key of config.json where it is evident.
    """
    config = model.config.get_text_config()
    first, extra = config.num_hidden_layers, getattr(config, "num_nextn_predict_layers", None) or 0
    left = [n for n in unexpected if not _is_predictor(n, first, extra)]
    if left:
        raise StartupError(surplus_text(str(path), left, config))
    for tensor in _not_floating(path):
        if not _may_be_integer(tensor.name, model):
            raise StartupError(f"{path}: {tensor.name} is {tensor.dtype} in the weights, where the model has floats.")


def surplus_text(label: str, names: Iterable[str], config: Any) -> str:
    """The refusal of tensors without a place."""
    ordered = sorted(names)
    more = f" and {len(ordered) - SHOWN} more" if len(ordered) > SHOWN else ""
    found = f"{len(ordered)} tensor{'s' * (len(ordered) > 1)} that the configuration has no place for"
    return f"{label}: the weights have {found}: {', '.join(ordered[:SHOWN])}{more}{_why(ordered, config)}."


def _why(names: list[str], config: Any) -> str:
    layers = {int(found[1]) for n in names if (found := _LAYER.search(n))}
    if layers and min(layers) >= config.num_hidden_layers:
        key = getattr(config, "attribute_map", {}).get("num_hidden_layers", "num_hidden_layers")
        return f"; {key} is {config.num_hidden_layers}, the weights go up to layer {max(layers)} (counted from 0)"
    for pattern, key in _SWITCHES:
        if getattr(config, key, None) is False and all(pattern.search(n) for n in names):
            return f"; {key} is false"
    return ""


def _is_predictor(name: str, first: int, extra: int) -> bool:
    """Whether it is of the layers that predict further tokens, which the configuration counts apart."""
    found = _LAYER.search(name)
    return found is not None and first <= int(found[1]) < first + extra


def _not_floating(path: Path) -> Iterator[TensorEntry]:
    for file in sorted(path.glob("*.safetensors")):
        yield from (t for t in SafeFile.open(file).tensors if t.dtype in NOT_FLOATING)


def _may_be_integer(name: str, model: Any) -> bool:
    """Whether the model has an integer of that name, or ignores it."""
    prefix = f"{model.base_model_prefix}."
    own = model.state_dict()
    for each in (name, prefix + name, name.removeprefix(prefix)):
        if each in own:
            return not own[each].is_floating_point()
    ignored = {*(model._keys_to_ignore_on_load_unexpected or ()), r"(^|\.)position_ids$"}
    return any(re.search(pattern, name) for pattern in ignored)
