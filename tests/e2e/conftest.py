"""End to end: real daemons, real weights, real sockets. One cluster per module; each daemon on a core of its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from benchmarks.cluster import Cluster, running_cluster


@pytest.fixture(scope="module")
def cluster(smollm2_dir: Path) -> Iterator[Cluster]:
    with running_cluster(smollm2_dir) as c:
        yield c


@pytest.fixture(scope="module")
def gemma_cluster(gemma3_dir: Path) -> Iterator[Cluster]:
    with running_cluster(gemma3_dir) as c:
        yield c


@pytest.fixture(scope="session")
def import_family(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes a served model directory of a family with tiny random weights and SmolLM2's tokenizer."""
    from tests.engine.families import FAMILIES  # torch takes seconds, and most need none

    @cache
    def make(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        family = FAMILIES[name]
        sizes = {"vocab_size": 49152, "max_position_embeddings": 4096, "eos_token_id": 2}
        model = type(family)(family.name, family.known_as, family.formula, family.extra | sizes).model()
        model.save_pretrained(folder / "source")
        for file in smollm2_dir.glob("tokenizer*"):
            shutil.copy(file, folder / "source")
        command = [sys.executable, "-m", "prefilld.ctl", "model", "import", folder / "source", folder / "served"]
        subprocess.run([str(part) for part in command], check=True, capture_output=True)
        return folder / "served"

    return make
