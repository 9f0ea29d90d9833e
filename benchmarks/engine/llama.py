"""llama.cpp for the benchmark: its server built from the source inside the llama-cpp-python distribution, and models.

Everything goes into the cache folder and is made once. Knows nothing of the measurement.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.engine.gguf_export import NotExportable, export
from common.engine.manifest import read_manifest

VERSION = "0.3.36"
_VENDORED = "/vendor/llama.cpp/"
# A plain release build for this machine; no web pages, no TLS, nothing fetched while building.
_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DBUILD_SHARED_LIBS=OFF", "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_OPENSSL=OFF",
)  # fmt: skip
Say = Callable[[str], None]


class NoLlama(RuntimeError):
    """llama.cpp could not be made ready; the text says why."""


def binaries(cache: Path, *, jobs: int, say: Say) -> Path:
    """The folder of llama-server and llama-quantize; built when missing (15 to 40 minutes of one core)."""
    home = cache / f"llama.cpp-{VERSION}"
    folder = home / "build" / "bin"
    if (home / ".complete").exists():
        return folder
    if not (home / "src" / "CMakeLists.txt").exists():
        say(f"fetching the source of llama.cpp (llama-cpp-python {VERSION})")
        _fetch(home / "src")
    say("building llama.cpp's server (once; 15 to 40 minutes of one core)")
    _run(["cmake", "-S", str(home / "src"), "-B", str(home / "build"), *_OPTIONS], home / "build.log")
    targets = ["--target", "llama-server", "llama-quantize", "-j", str(jobs)]
    _run(["cmake", "--build", str(home / "build"), *targets], home / "build.log")
    (home / ".complete").touch()
    return folder


def model_file(cache: Path, model: Path, *, is_q8: bool, jobs: int, say: Say) -> Path:
    """The GGUF file of a model directory: F32, or Q8_0 made from that by llama-quantize. Raises NoLlama."""
    folder = cache / "gguf"
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{model.name}-{read_manifest(model).weights_digest[:16]}"
    full, q8 = folder / f"{stem}-f32.gguf", folder / f"{stem}-q8_0.gguf"
    if not full.exists():
        say(f"writing {full.name}")
        try:
            export(model, full)
        except NotExportable as error:
            raise NoLlama(str(error)) from error
    if not is_q8:
        return full
    if not q8.exists():
        say(f"writing {q8.name}")
        partial = q8.with_suffix(".part")
        command = [str(binaries(cache, jobs=jobs, say=say) / "llama-quantize"), str(full), str(partial), "Q8_0"]
        _run([*command, str(jobs)], folder / "quantize.log")
        partial.rename(q8)
    return q8


def _fetch(dest: Path) -> None:
    """The vendored tree of the source distribution, with the pip of this environment."""
    dest.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=dest.parent) as name:
        work = Path(name)
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", "llama-cpp-python"]
        _run([*pip, "--dest", name, f"llama-cpp-python=={VERSION}"], dest.parent / "fetch.log")
        with tarfile.open(next(work.glob("*.tar.gz"))) as archive:
            members = [m for m in archive.getmembers() if _VENDORED in m.name]
            archive.extractall(work, members=members, filter="data")
        if not members:
            raise NoLlama(f"llama-cpp-python {VERSION} holds no {_VENDORED}")
        next(work.glob(f"*{_VENDORED.rstrip('/')}")).rename(dest)


def _run(command: Sequence[str], log: Path) -> None:
    try:
        with log.open("ab") as out:
            subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    except (OSError, subprocess.CalledProcessError) as error:
        raise NoLlama(f"{command[0]} failed ({error}); see {log}") from error
