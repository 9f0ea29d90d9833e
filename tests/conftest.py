"""Fixtures for the whole suite: one compute thread, and the real models that `make model` puts into PRFAAS_HOME."""

from __future__ import annotations

import os
from pathlib import Path

# Before torch is imported anywhere: several torch processes with several threads each slow each other down many times.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest

from common.engine.fetch import model_dir
from common.engine.manifest import MANIFEST


def _real_model(name: str) -> Path:
    """A missing model fails the test: a skipped one would look like a pass."""
    path = model_dir(name)
    if not (path / MANIFEST).is_file():
        pytest.fail(f"{path} is missing: run `make model MODEL={name}` first (make test does it).", pytrace=False)
    return path


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """SmolLM2-135M-Instruct: dense, with a chat template."""
    return _real_model("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def gemma3_dir() -> Path:
    """Gemma 3 270M: 15 sliding-window and 3 full layers, no chat template."""
    return _real_model("gemma3-270m")
