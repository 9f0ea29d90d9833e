"""Turns a GGUF file or a Hugging Face directory into a served model directory, once.

    served directory = config.json, generation_config.json, *.safetensors, tokenizer files, manifest.json

Everything is written into a hidden folder beside DEST, flushed, and renamed: DEST is either absent or complete. Knows
no network. Run as a child process by `prefillctl model import` (python -m common.engine.importer SOURCE DEST).
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from common.engine import gguf_source, hf_source
from common.engine.loader import check_loads, verify_model_dir
from common.engine.manifest import MANIFEST, Manifest, build_manifest, canonical_digest, hash_files, model_digests
from common.errors import EXIT_OK, EXIT_RUNTIME, PdError, StartupError
from common.text.tokenizer import Tokenizer

# As nodes are named: it stands in logs, labels and what clients ask for.
NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}"
_INSTEAD = "Remove it, or import into another directory."
Progress = Callable[[str], None]


class ImportRefused(StartupError):
    """The source cannot be imported, or the destination is in the way."""

    code = "import"


def import_model(source: Path, dest: Path, *, name: str = "", progress: Progress = lambda _: None) -> Manifest:
    """Import `source` (a .gguf file or a Hugging Face directory) into the new directory `dest`.

    `name` (default: the name of `dest`) is restricted like a node's. Returns the manifest; at once when `dest` already
    is the complete import of the same source under the same name.
    Raises StartupError (ImportRefused) when the source is unusable, `dest` holds anything else, or space runs out.
    """
    source, dest = source.expanduser(), dest.expanduser().absolute()
    name = name or dest.name
    if not re.fullmatch(NAME, name):
        wanted = "letters, digits, '.', '_' and '-', 63 at most, the first one a letter or digit"
        raise ImportRefused(f"the model's name {name!r} has the wrong form: {wanted}; give another with --name.")
    origin = _origin(source)
    if (done := _existing(dest, name, source, origin)) is not None:
        progress(f"{dest} is already the complete import of {source}: nothing was done")
        return done
    with _clear_errors(dest):
        dest.parent.mkdir(parents=True, exist_ok=True)
        _check_space(source, dest.parent)
        with _staging(dest) as staging:
            _convert(source, staging, progress)
            progress("computing digests")
            manifest = build_manifest(staging, name, origin)
            (staging / MANIFEST).write_text(manifest.to_json())
            _flush(staging)
            return _put_in_place(staging, dest, source, manifest)


def _origin(source: Path) -> dict[str, str]:
    """Kind, file name and digest of the source's bytes. Raises ImportRefused when it is neither kind."""
    if not source.exists():
        raise ImportRefused(f"{source} does not exist.")
    if source.is_dir():
        names = hf_source.file_names(source)
        listing = {entry.name: entry.sha256 for entry in hash_files(source, names)}
        return {"kind": "huggingface", "file": source.resolve().name, "digest": canonical_digest(listing)}
    if not source.is_file() or not gguf_source.is_gguf(source):
        raise ImportRefused(
            f"{source} is neither a Hugging Face directory nor a GGUF file (it does not begin with GGUF)."
        )
    return {"kind": "gguf", "file": source.name, "digest": hash_files(source.parent, [source.name])[0].sha256}


def _existing(dest: Path, name: str, source: Path, origin: dict[str, str]) -> Manifest | None:
    """The manifest of `dest` if it is this very import and whole; None if there is nothing there."""
    if not dest.exists() or (dest.is_dir() and not any(dest.iterdir())):
        return None
    try:
        found = verify_model_dir(dest)
    except StartupError as error:
        raise ImportRefused(f"{dest} exists and is not a complete import ({error}) {_INSTEAD}") from error
    if found.source.get("digest") != origin["digest"]:
        was = f"{found.source.get('file')} (digest {str(found.source.get('digest'))[:16]})"
        raise ImportRefused(
            f"{dest} exists and was imported from another source, {was}, not from {source.resolve()}"
            f" (digest {origin['digest'][:16]}). {_INSTEAD}"
        )
    if found.name != name:
        raise ImportRefused(
            f"{dest} exists and holds this model under the name {found.name!r}, not {name!r}. {_INSTEAD}"
        )
    return found


def _convert(source: Path, staging: Path, progress: Progress) -> None:
    """Write the files, and see that they make a model."""
    if source.is_dir():
        hf_source.copy_directory(source, staging, progress)
    else:
        gguf_source.write_hf_directory(source, staging, progress)
    progress("checking that the weights fit the configuration")
    try:
        check_loads(staging)
        progress("checking the tokenizer and the chat template")
        tokenizer = Tokenizer.load(staging)
    except StartupError as error:
        raise ImportRefused(str(error).replace(str(staging), str(source))) from error
    if not tokenizer.has_chat_template:
        progress("the model has no chat template: /v1/chat/completions will be refused, /v1/completions served")


def _check_space(source: Path, parent: Path) -> None:
    needed = hf_source.needed_bytes(source) if source.is_dir() else gguf_source.needed_bytes(source)
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise ImportRefused(f"{parent} has {free >> 20} MiB free but the import may need {needed >> 20} MiB.")


@contextmanager
def _clear_errors(dest: Path) -> Iterator[None]:
    """Operating system errors become one sentence."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ImportRefused(f"No space left for {dest}: the import was undone.") from error
        raise ImportRefused(f"{dest} cannot be written: {error}.") from error


@contextmanager
def _staging(dest: Path) -> Iterator[Path]:
    """A folder beside `dest` that disappears unless it was renamed."""
    staging = Path(tempfile.mkdtemp(prefix=f".{dest.name}.import-", dir=dest.parent))
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _flush(staging: Path) -> None:
    """Make everything durable and readable for the daemon's user before the name appears."""
    for path in (*staging.iterdir(), staging):
        path.chmod(0o755 if path.is_dir() else 0o644)
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _put_in_place(staging: Path, dest: Path, source: Path, manifest: Manifest) -> Manifest:
    try:
        staging.rename(dest)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        # Another import of the same source finished first; anything else in the way is refused.
        other = _existing(dest, manifest.name, source, dict(manifest.source))
        if other is None:
            raise
        return other
    return manifest


def main(argv: Sequence[str] | None = None) -> int:
    """Command line: progress on standard error, the result (or one JSON object) on standard output."""
    parser = argparse.ArgumentParser(
        prog="prefillctl model import", description="Import a GGUF file or a Hugging Face directory, once."
    )
    parser.add_argument("source", type=Path, help="a .gguf file or a directory with config.json and *.safetensors")
    parser.add_argument("dest", type=Path, help="the served model directory to make")
    parser.add_argument(
        "--name",
        default="",
        help="model name shown to clients: letters, digits, '.', '_', '-' (default: the name of DEST)",
    )
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    args = parser.parse_args(argv)
    os.environ.setdefault("TQDM_DISABLE", "1")  # our own progress lines are enough
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        was_there = (args.dest.expanduser() / MANIFEST).exists()
        manifest = import_model(args.source, args.dest, name=args.name, progress=_report)
    except PdError as error:
        text = json.dumps({"error": {"code": error.code, "message": str(error)}}) + "\n" if args.json else ""
        sys.stdout.write(text)
        sys.stderr.write(f"prefillctl: {error}\n")
        return EXIT_RUNTIME
    sys.stdout.write(_result(manifest, args.dest, as_json=args.json, was_there=was_there))
    return EXIT_OK


def _report(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def _result(manifest: Manifest, dest: Path, *, as_json: bool, was_there: bool) -> str:
    if as_json:
        facts = {"name": manifest.name, "path": str(dest.absolute()), "bytes": manifest.total_bytes}
        return json.dumps({**facts, **model_digests(manifest)}) + "\n"
    size = f"{manifest.total_bytes / 1e6:.0f} MB"
    done = f"{manifest.name} is in" if was_there else f"imported {manifest.name} into"
    return f"{done} {dest} ({size}, weights {manifest.weights_digest[:16]})\n"


if __name__ == "__main__":
    sys.exit(main())
