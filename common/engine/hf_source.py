"""Picks and copies the files of a Hugging Face directory that a served model directory needs.

Weights are copied as they are (dtype and split kept); pickle formats are refused, since reading one runs code from it.
Called by the importer.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from common.engine.checkpoint import check_settings, read_json
from common.engine.safefile import SafeFile
from common.errors import StartupError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
# Everything else in such a directory (README, images, other formats' weights) is not served.
SIDE_FILES = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "chat_template.json", "tokenizer.model", "vocab.json", "merges.txt", "vocab.txt",
)  # fmt: skip
TOKENIZER_SOURCES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def file_names(source: Path) -> list[str]:
    """Names of the files to take, sorted. Raises StartupError when something needed is missing or a pickle."""
    if not (source / "config.json").is_file():
        raise StartupError(f"{source / 'config.json'} is missing: this is not a Hugging Face model directory.")
    if not any((source / name).is_file() for name in TOKENIZER_SOURCES):
        raise StartupError(f"{source} has no tokenizer ({', '.join(TOKENIZER_SOURCES)}).")
    side = [name for name in SIDE_FILES if (source / name).is_file()]
    return sorted(["config.json", *side, *_weight_names(source)])


def needed_bytes(source: Path) -> int:
    """Size of the copy."""
    return sum((source / name).stat().st_size for name in file_names(source))


def copy_directory(source: Path, staging: Path, progress: Callable[[str], None]) -> None:
    """Copy what is served into `staging`. Raises StartupError when the model is not one that can be loaded."""
    _check_config(source)
    for name in _weight_names(source):
        if name.endswith(".safetensors"):
            SafeFile.open(source / name)
    for name in file_names(source):
        progress(f"copying {name}")
        shutil.copyfile(source / name, staging / name)
    if not (staging / "tokenizer.json").exists():
        progress("converting the tokenizer")
        _convert_tokenizer(staging)


def _weight_names(source: Path) -> list[str]:
    if (source / INDEX).is_file():
        return [INDEX, *_shard_names(source / INDEX)]
    if (source / WEIGHTS).is_file():
        return [WEIGHTS]
    pickles = sorted(p.name for p in source.iterdir() if p.suffix in PICKLE_SUFFIXES)
    if pickles:
        raise StartupError(
            f"{source / pickles[0]} is in a pickle format, which can run code when it is read: "
            f"convert the weights to safetensors first."
        )
    raise StartupError(f"{source} has no weights: neither {WEIGHTS} nor {INDEX}.")


def _shard_names(index: Path) -> list[str]:
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(n, str) for n in shards.values()):
        raise StartupError(f"{index} has no valid weight_map.")
    names = sorted(set(shards.values()))
    for name in names:
        if "/" in name or not name.endswith(".safetensors"):
            raise StartupError(f"{index} names {name!r}, which is not a safetensors file of this directory.")
        if not (index.parent / name).is_file():
            raise StartupError(f"{index.parent / name} is missing, though {index.name} names it.")
    return names


def _check_config(source: Path) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config = read_json(source / "config.json")
    kind = config.get("model_type")
    if kind not in CONFIG_MAPPING or kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise StartupError(
            f"{source / 'config.json'}: model_type {kind!r} is not a causal language model that transformers defines, "
            f"and code that comes with a model is never run."
        )
    check_settings(str(source / "config.json"), config)


def _convert_tokenizer(staging: Path) -> None:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(staging), local_files_only=True, trust_remote_code=False)
        tokenizer.save_pretrained(staging)
    except (ValueError, KeyError, OSError, TypeError, ImportError) as error:
        raise StartupError(
            f"The tokenizer of {staging.name} cannot be converted to tokenizer.json: {error}."
        ) from error
