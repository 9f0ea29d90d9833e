"""The manifest of a served model directory: which files belong to it, and digests of what they mean.

Files are listed with size and SHA-256, so that damage is found before anything is loaded. The three content digests
(weights, config, tokenizer) say whether two directories hold the same model, however it is split into files and
whichever version of a library wrote them; they go into the Hello of the protocol.

Knows neither torch nor transformers. Called by the importer (writes) and the loader (reads and verifies).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from common.engine.checkpoint import read_json
from common.engine.safefile import SafeFile, TensorEntry
from common.errors import StartupError

MANIFEST = "manifest.json"
FORMAT = 1
MAX_MANIFEST_BYTES = 16 << 20

# What a library writes into config.json about itself or about the file, not about the model.
CONFIG_NOISE = {"_name_or_path", "_model_name_or_path", "transformers_version", "torch_dtype", "dtype", "auto_map"}
# Settings of a tokenizer.json that a caller may change from call to call.
TOKENIZER_NOISE = {"truncation", "padding"}


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of the directory: plain name, size in bytes, SHA-256 in hex."""

    name: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """Contents of manifest.json. `source` tells what was imported: kind, file name and a digest of its bytes."""

    name: str
    files: tuple[FileEntry, ...]
    weights_digest: str
    config_digest: str
    tokenizer_digest: str
    source: Mapping[str, str]

    def to_json(self) -> str:
        """Text of manifest.json; it ends with a digest of itself."""
        body = {
            "format": FORMAT,
            "name": self.name,
            "source": dict(self.source),
            "digests": model_digests(self),
            "files": {f.name: {"bytes": f.num_bytes, "sha256": f.sha256} for f in self.files},
        }
        return json.dumps({**body, "manifest_digest": canonical_digest(body)}, indent=2, sort_keys=True) + "\n"

    @property
    def total_bytes(self) -> int:
        """Size of all listed files."""
        return sum(f.num_bytes for f in self.files)


def model_digests(manifest: Manifest) -> dict[str, str]:
    """The content digests under the names that ModelInfo gives them; equal models have equal digests."""
    return {
        "weights_digest": manifest.weights_digest,
        "config_digest": manifest.config_digest,
        "tokenizer_digest": manifest.tokenizer_digest,
    }


def canonical_digest(value: object) -> str:
    """SHA-256 (hex) of a JSON value, independent of the order of keys and of white space."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def build_manifest(directory: Path, name: str, source: Mapping[str, str]) -> Manifest:
    """Describe a finished directory. Raises StartupError when a file of it is malformed."""
    names = sorted(p.name for p in directory.iterdir() if p.name != MANIFEST)
    return Manifest(
        name=name,
        files=tuple(hash_files(directory, names)),
        weights_digest=weights_digest(directory / n for n in names if n.endswith(".safetensors")),
        config_digest=_json_digest(directory / "config.json", CONFIG_NOISE),
        tokenizer_digest=_json_digest(directory / "tokenizer.json", TOKENIZER_NOISE),
        source=dict(source),
    )


def hash_files(directory: Path, names: Iterable[str]) -> list[FileEntry]:
    """Size and SHA-256 of each file, several at a time (hashing releases the interpreter lock)."""
    with ThreadPoolExecutor(max_workers=max(1, len(os.sched_getaffinity(0)))) as pool:
        return list(pool.map(lambda name: _hash_file(directory / name), names))


def weights_digest(paths: Iterable[Path]) -> str:
    """Digest over name, dtype, shape and bytes of every tensor in order of name, however they are split into files.

    Raises StartupError when a file is malformed or two files hold a tensor of the same name.
    """
    lines: dict[str, str] = {}
    for path in paths:
        file = SafeFile.open(path)
        with ThreadPoolExecutor(max_workers=max(1, len(os.sched_getaffinity(0)))) as pool:
            digests = pool.map(partial(_tensor_digest, file), file.tensors)
            for tensor, digest in zip(file.tensors, digests, strict=True):
                if tensor.name in lines:
                    raise StartupError(f"{path}: tensor {tensor.name!r} is also in another file of this model.")
                lines[tensor.name] = f"{tensor.name}\t{tensor.dtype}\t{list(tensor.shape)}\t{digest}\n"
    whole = hashlib.sha256()
    for name in sorted(lines):
        whole.update(lines[name].encode())
    return whole.hexdigest()


def read_manifest(directory: Path) -> Manifest:
    """Parse manifest.json. Raises StartupError naming the file when it is missing, altered or of another format."""
    path = directory / MANIFEST
    try:
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise StartupError(f"{path} is larger than {MAX_MANIFEST_BYTES} bytes: it is not a model manifest.")
        body = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise StartupError(
            f"{path} is missing: {directory} is not an imported model; "
            f"make one with `prefillctl model import SOURCE DEST`."
        ) from None
    except (OSError, ValueError) as error:
        raise StartupError(f"{path} cannot be read: {error}.") from error
    try:
        return _parse(body)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StartupError(f"{path} is not a valid manifest of format {FORMAT}: {error}.") from error


def _parse(body: dict[str, Any]) -> Manifest:
    if body["format"] != FORMAT:
        raise ValueError(f"its format is {body['format']!r}")
    stated = body.pop("manifest_digest")
    if canonical_digest(body) != stated:
        raise ValueError("its own digest does not match, so it was altered")
    files = tuple(FileEntry(n, int(f["bytes"]), str(f["sha256"])) for n, f in sorted(body["files"].items()))
    for entry in files:
        if entry.name in ("", ".", "..", MANIFEST) or "/" in entry.name or "\0" in entry.name:
            raise ValueError(f"{entry.name!r} is not a plain file name")
    return Manifest(name=str(body["name"]), files=files, source=dict(body["source"]), **body["digests"])


def _tensor_digest(file: SafeFile, tensor: TensorEntry) -> str:
    return hashlib.sha256(file.data(tensor)).hexdigest()


def _hash_file(path: Path) -> FileEntry:
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            return FileEntry(path.name, os.fstat(file.fileno()).st_size, digest)
    except OSError as error:
        raise StartupError(f"{path} cannot be read: {error}.") from error


def _json_digest(path: Path, noise: set[str]) -> str:
    return canonical_digest({k: v for k, v in read_json(path).items() if k not in noise})
