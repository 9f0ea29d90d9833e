"""Verifies a served model directory and loads it: nothing is used that the manifest does not vouch for.

Knows no configuration and no network; code that comes with a model is never run. Called by the engine's thread at
start-up (load_model) and by the importer (verify_model_dir).
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.engine.checkpoint import check_settings, check_tensors, read_json
from common.engine.manifest import MANIFEST, FileEntry, Manifest, hash_files, read_manifest
from common.errors import StartupError

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    import torch

DTYPES = ("float32", "bfloat16", "float16")
# transformers loads under settings of the whole process: two loads at once would mix them up.
_loading = threading.Lock()
# For models without positions (pure state-space models), which name no limit.
UNBOUNDED_CONTEXT = 1 << 20


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready for inference. `model` is a transformers causal language model in eval mode, without gradients."""

    model: Any
    manifest: Manifest
    tokenizer_dir: Path
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    max_context: int


def verify_model_dir(path: Path) -> Manifest:
    """Check every byte of the directory against its manifest.

    Raises StartupError naming the file that is missing, truncated, altered, or there without being listed.
    """
    manifest = read_manifest(path)
    listed = {entry.name: entry for entry in manifest.files}
    for problem in directory_problems(path, manifest):
        raise StartupError(problem)
    for actual in hash_files(path, listed):
        if actual != listed[actual.name]:
            raise StartupError(f"{path / actual.name} was altered: its SHA-256 is not the one in {MANIFEST}.")
    return manifest


def directory_problems(path: Path, manifest: Manifest) -> Iterator[str]:
    """What can be seen without reading a file: missing, of another size, unreadable, or there without being listed."""
    for entry in manifest.files:
        if problem := _file_problem(path / entry.name, entry):
            yield problem
    listed = {MANIFEST, *(entry.name for entry in manifest.files)}
    for found in sorted(path.iterdir()):
        if found.name not in listed and not _is_harmless(found):
            yield f"{found} is not listed in {MANIFEST}: it does not belong to this model."


def load_model(
    path: Path, *, device: str = "cpu", dtype: str = "float32", attn_implementation: str | None = None
) -> LoadedModel:
    """Verify and load `path`. `attn_implementation`: a name that transformers knows; None: its best for this model.

    Raises StartupError when the directory is damaged, the device does not exist, the configuration's sizes cannot be,
    or the weights do not fit the configuration (missing, left over, of another shape or type) or are not finite.
    """
    import torch

    manifest = verify_model_dir(path)
    target = find_device(device)
    if dtype not in DTYPES:
        raise StartupError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}.")
    model = _load_weights(path, getattr(torch, dtype), attn_implementation)
    check_finite(path, model)
    model = model.to(target).eval().requires_grad_(False)
    text = model.config.get_text_config()
    return LoadedModel(
        model=model,
        manifest=manifest,
        tokenizer_dir=path,
        eos_token_ids=_eos_token_ids(path, text),
        vocab_size=int(text.vocab_size),
        max_context=int(getattr(text, "max_position_embeddings", None) or UNBOUNDED_CONTEXT),
    )


def check_loads(path: Path) -> None:
    """Whether transformers makes a model of a Hugging Face directory, and its weights are finite numbers.

    Raises StartupError with what does not fit.
    """
    check_finite(path, _load_weights(path, "auto", None))


def check_finite(path: Path, model: Any) -> None:
    """Raises StartupError that names the first weight with NaN or infinity."""
    for name, parameter in model.named_parameters():
        # A sum reads the memory once; only one that is not finite is looked at again.
        if not parameter.sum().isfinite() and not (finite := parameter.isfinite()).all():
            bad = parameter.numel() - int(finite.sum())
            raise StartupError(f"{path}: {name} has {bad} of {parameter.numel()} values that are NaN or infinite.")


def _load_weights(path: Path, dtype: torch.dtype | str, attn_implementation: str | None) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    check_settings(str(path / "config.json"), read_json(path / "config.json"))
    # Standard error belongs to the log; what concerns us is said there by ourselves.
    messages: Any = logging
    messages.disable_progress_bar()
    messages.set_verbosity_error()
    auto_class: Any = AutoModelForCausalLM
    try:
        with _loading:
            model, report = auto_class.from_pretrained(
                str(path),
                dtype=dtype,
                attn_implementation=attn_implementation,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # said below, in our own words
            )
    except Exception as error:  # configuration classes raise errors of their own kinds
        raise StartupError(f"{path} cannot be loaded: {' '.join(str(error).split())}") from error
    # transformers would initialise what is missing or does not fit at random and go on.
    for name, found, wanted in sorted(report["mismatched_keys"])[:1]:
        asked = f"config.json asks for {list(wanted)}"
        raise StartupError(f"{path}: {name} is {list(found)} in the weights, {asked}.")
    if names := sorted(map(str, report["missing_keys"])):
        few = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        raise StartupError(f"{path}: the weights lack {few}.")
    check_tensors(path, model, [str(name) for name in report["unexpected_keys"]])
    return model


def find_device(name: str) -> torch.device:
    """The device of that name. Raises StartupError when this machine, or this build of torch, does not have it."""
    import torch

    try:
        device = torch.device(name)
    except RuntimeError:
        raise StartupError(f"device {name!r} is not a device of torch; use 'cpu' or 'cuda'.") from None
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        raise StartupError(f"device {name!r} was asked for but torch sees {torch.cuda.device_count()} CUDA devices.")
    return device


def _eos_token_ids(path: Path, config: Any) -> tuple[int, ...]:
    """From generation_config.json, which knows end-of-turn tokens too, else from the config; sorted."""
    generation = path / "generation_config.json"
    value = json.loads(generation.read_bytes()).get("eos_token_id") if generation.exists() else None
    if value is None:
        value = config.eos_token_id
    ids = {int(n) for n in ([] if value is None else value if isinstance(value, list) else [value])}
    outside = sorted(n for n in ids if not 0 <= n < config.vocab_size)
    if outside:
        log.warning("eos_token_id %s: not below vocab_size %d, so never sampled", outside, config.vocab_size)
    return tuple(sorted(ids.difference(outside)))


def _file_problem(path: Path, entry: FileEntry) -> str:
    try:
        num_bytes = path.stat().st_size
    except FileNotFoundError:
        return f"{path} is missing, though {MANIFEST} lists it."
    except OSError as error:
        return f"{path} cannot be read: {error}."
    if num_bytes != entry.num_bytes:
        return f"{path} has {num_bytes} bytes instead of the {entry.num_bytes} that {MANIFEST} lists."
    return "" if os.access(path, os.R_OK) else f"{path} may not be read by this user."


def _is_harmless(path: Path) -> bool:
    """Notes and hidden files; transformers reads neither."""
    return path.name.startswith(".") or path.suffix == ".md"
