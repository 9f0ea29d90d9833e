"""End to end: real daemons, real weights, real sockets. One cluster per module; each daemon on a core of its own."""

from __future__ import annotations

from collections.abc import Iterator
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
