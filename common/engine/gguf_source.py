"""Writes the contents of a GGUF file as a Hugging Face directory: float32 weights, config, tokenizer, chat template.

Dequantisation is exact: every value is what the file's blocks stand for, rounded to float32 as the format defines it,
with the file's own layout (rotary pairs of llama, norm weights of gemma) turned back. Knows nothing of manifests.
Called by the importer.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from common.engine.checkpoint import check_settings, surplus_text
from common.engine.gguf_header import GgufHeader, read_header
from common.errors import StartupError

MAGIC = b"GGUF"
# What the readers of the format raise when a file is cut short or its fields make no sense.
MALFORMED = (ValueError, LookupError, TypeError, OSError, OverflowError, MemoryError, struct.error)


def is_gguf(path: Path) -> bool:
    """True when the file begins as a GGUF file does."""
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def needed_bytes(path: Path) -> int:
    """A generous estimate of the directory's size: the smallest block type packs about 8 weights into a float32."""
    return path.stat().st_size * 8


def write_hf_directory(path: Path, staging: Path, progress: Callable[[str], None]) -> None:
    """Convert `path` into `staging`. Raises StartupError when the architecture is unknown or tensors are missing."""
    check_reader()
    progress(f"reading {path.name}")
    held = read_header(path)
    config = _read_config(path)
    check_settings(str(path), config.to_dict())
    progress(f"converting the weights of {config.model_type} to float32")
    tensors = _read_tensors(path, config)
    _check_surplus(path, config, held)
    _check_complete(path, config, tensors)
    _save(staging, config, tensors)
    progress("building the tokenizer")
    _write_tokenizer(path, staging)


def check_reader() -> None:
    """Raises StartupError when the package that reads GGUF files is missing: the library would print a screenful."""
    if find_spec("gguf") is None:
        raise StartupError("Importing a GGUF file needs the package gguf: pip install gguf")


def _read_config(path: Path) -> Any:
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(
            str(path.parent), gguf_file=path.name, local_files_only=True, trust_remote_code=False
        )
    except ImportError as error:
        raise StartupError(
            f"Importing a GGUF file needs a working package gguf: pip install --upgrade gguf ({error})."
        ) from None
    except MALFORMED as error:
        raise StartupError(f"{path} cannot be imported: {_one_line(error)}.") from error
    return config


def _read_tensors(path: Path, config: Any) -> dict[str, Any]:
    """Tensors under their Hugging Face names. A model without storage tells the names and their order."""
    from transformers import modeling_gguf_pytorch_utils

    try:
        reader: Any = modeling_gguf_pytorch_utils
        loaded = reader.load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=_empty_model(path, config))
    except (*MALFORMED, NotImplementedError) as error:
        raise StartupError(f"{path} cannot be imported: {_one_line(error)}.") from error
    tensors: dict[str, Any] = loaded["tensors"]
    return tensors


def _empty_model(path: Path, config: Any) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    auto_class: Any = AutoModelForCausalLM
    try:
        with torch.device("meta"):
            return auto_class.from_config(config, trust_remote_code=False)
    except ValueError as error:
        raise StartupError(f"{path}: {config.model_type!r} is not a causal language model of transformers.") from error


def _check_surplus(path: Path, config: Any, held: GgufHeader) -> None:
    """The library drops tensors that it does not map, such as biases and factors of rotary positions."""
    from transformers import modeling_gguf_pytorch_utils

    library: Any = modeling_gguf_pytorch_utils
    processor = library.TENSOR_PROCESSORS.get(held.architecture, library.TensorProcessor)(config=config.to_dict())
    known = set(library.get_gguf_hf_weights_map(_empty_model(path, config), processor))
    left = [t.name for t in held.tensors if t.name not in known and not _is_mapped_otherwise(t.name, known)]
    if left:
        raise StartupError(surplus_text(str(path), left, config))


def _is_mapped_otherwise(name: str, known: set[str]) -> bool:
    """Experts are joined under names without suffix or split, and GPT-2's output matrix is taken by name."""
    if name == "output.weight":
        return True
    layers = {n.split(".", 2)[1] for n in known if n.startswith("blk.")}
    return any(part in name for part in ("_exps.", "_projs.")) and name.split(".", 2)[1] in layers


def _check_complete(path: Path, config: Any, tensors: dict[str, Any]) -> None:
    """Every parameter must be there with its shape: a missing one would silently be initialised at random."""
    expected = _empty_model(path, config)
    tied = set(expected.all_tied_weights_keys) if config.tie_word_embeddings else set()
    for name, value in expected.state_dict().items():
        if name not in tensors:
            if name not in tied:
                raise StartupError(f"{path} lacks the tensor {name!r} that a {config.model_type} model needs.")
        elif tuple(tensors[name].shape) != tuple(value.shape):
            shapes = f"{list(tensors[name].shape)} instead of {list(value.shape)}"
            raise StartupError(f"{path}: tensor {name!r} has the shape {shapes}.")


def _save(staging: Path, config: Any, tensors: dict[str, Any]) -> None:
    from safetensors.torch import save_file
    from transformers import GenerationConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    config.dtype = "float32"
    config.save_pretrained(staging)
    generation_class: Any = GenerationConfig
    generation = generation_class(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    generation.save_pretrained(staging)
    ordered = {name: tensors[name].float().contiguous() for name in sorted(tensors)}
    save_file(ordered, staging / "model.safetensors", metadata={"format": "pt"})


def _write_tokenizer(path: Path, staging: Path) -> None:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(path.parent), gguf_file=path.name, local_files_only=True, trust_remote_code=False
        )
    except MALFORMED as error:
        raise StartupError(f"{path}: its tokenizer cannot be imported: {_one_line(error)}.") from error
    tokenizer.save_pretrained(staging)
    _tidy_tokenizer_config(staging / "tokenizer_config.json")


def _tidy_tokenizer_config(path: Path) -> None:
    """Drop what the library notes about this run, so that two imports of one file are equal byte for byte."""
    config = json.loads(path.read_text())
    for key in ("is_local", "local_files_only", "name_or_path"):
        config.pop(key, None)
    path.write_text(json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False) + "\n")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:500].rstrip(".") or type(error).__name__
