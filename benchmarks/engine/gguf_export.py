"""Writes a served model directory as a float32 GGUF file with the very same weights, for llama.cpp.

Knows the two architectures of `make model`: llama (its query and key rows are reordered for llama.cpp's rotary pairs)
and gemma3_text (llama.cpp's norms have the added 1 in the weight). Run by llama.py, after the file's name says the
digest of the weights.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

ARCHITECTURES = {"llama": gguf.MODEL_ARCH.LLAMA, "gemma3_text": gguf.MODEL_ARCH.GEMMA3}
Array = NDArray[Any]


class NotExportable(ValueError):
    """The model has an architecture or a tensor that this module does not know."""


def export(model: Path, dest: Path) -> None:
    """Write `dest` from the directory `model`; complete or absent. Raises NotExportable."""
    config = json.loads((model / "config.json").read_text())
    kind = config["model_type"]
    if kind not in ARCHITECTURES:
        raise NotExportable(f"no GGUF export for {kind!r}; there is one for {', '.join(ARCHITECTURES)}")
    arch = ARCHITECTURES[kind]
    partial = dest.with_suffix(f".{os.getpid()}.part")
    writer = gguf.GGUFWriter(partial, gguf.MODEL_ARCH_NAMES[arch], use_temp_file=False)
    _add_config(writer, config, model.name)
    _add_tokenizer(writer, model, config)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    with safe_open(model / "model.safetensors", framework="numpy") as tensors:
        for name in tensors.keys():  # noqa: SIM118 (not a mapping)
            new = names.get_name(name, try_suffixes=(".weight", ".bias"))
            if new is None:
                raise NotExportable(f"tensor {name!r} has no GGUF name")
            writer.add_tensor(new, _reordered(kind, name, tensors.get_tensor(name), config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(dest)


def _reordered(kind: str, name: str, weight: Array, config: dict[str, Any]) -> Array:
    weight = weight.astype(np.float32, copy=False)
    if kind == "gemma3_text" and name.endswith("norm.weight"):
        return np.asarray(weight + 1)
    if kind == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
        key = "num_attention_heads" if "q_proj" in name else "num_key_value_heads"
        heads = config[key]
        # halves of a head side by side -> pairs side by side
        pairs = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
        return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(weight.shape))
    return weight


def _add_config(writer: gguf.GGUFWriter, config: dict[str, Any], name: str) -> None:
    writer.add_name(name)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    rope = config["rope_parameters"]
    if config["model_type"] == "llama":
        writer.add_rope_dimension_count(config["head_dim"])
        writer.add_rope_freq_base(rope["rope_theta"])
    else:
        # llama.cpp knows by itself that every sixth layer is full and windows rotate with base 10,000
        writer.add_rope_freq_base(rope["full_attention"]["rope_theta"])
        writer.add_sliding_window(config["sliding_window"])


def _add_tokenizer(writer: gguf.GGUFWriter, model: Path, config: dict[str, Any]) -> None:
    """Enough to turn ids into text; prompts come as ids. Scores stand in for the merge order of sentencepiece."""
    data = json.loads((model / "tokenizer.json").read_text())
    special = {token["id"] for token in data["added_tokens"] if token["special"]}
    ids = {index: token for token, index in data["model"]["vocab"].items()}
    ids |= {token["id"]: token["content"] for token in data["added_tokens"]}
    is_bytes_level = config["model_type"] == "llama"
    tokens, types, scores = [], [], []
    for index in range(config["vocab_size"]):
        token = ids.get(index, f"[PAD{index}]")
        tokens.append(token)
        types.append(_token_type(token, index, special, is_known=index in ids, config=config))
        scores.append(-float(index))
    if is_bytes_level:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in data["model"]["merges"]])
    else:
        writer.add_tokenizer_model("llama")
        writer.add_token_scores(scores)
        writer.add_add_space_prefix(False)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_add_bos_token(False)
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_pad_token_id(config["pad_token_id"])
    writer.add_unk_token_id(config["unk_token_id"])


def _token_type(token: str, index: int, special: set[int], *, is_known: bool, config: dict[str, Any]) -> int:
    types = gguf.TokenType
    if not is_known:
        return types.UNUSED
    if config["model_type"] != "llama":
        if index == config["unk_token_id"]:
            return types.UNKNOWN
        if len(token) == 6 and token.startswith("<0x"):
            return types.BYTE
    return types.CONTROL if index in special else types.NORMAL
