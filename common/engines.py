"""Makes the backend a configuration asks for. The engine's libraries are imported on the engine's own thread, not here.

Knows which engines exist, nothing else of them. Called by both daemons' services.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from common.fake import FakeExecutor, FakeOptions
from common.local_backend import LocalBackend
from common.sched.executor import Executor
from common.worker import WorkerOptions


def default_chunk_tokens(device: str) -> int:
    """Tokens per chunk unless configured."""
    return 2048 if device.startswith("cuda") else 256


def torch_backend(
    path: Path,
    options: WorkerOptions,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    kv_dtype: str = "",
    threads: int = 0,
) -> LocalBackend:
    """The engine of common/engine on a served model directory. `threads` 0 means every core it may use."""

    def build() -> Executor:
        # Read by OpenMP when torch loads it: idle threads must not spin on cores that others need.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        from common.engine.runner import RunnerOptions, load

        num_threads = threads or len(os.sched_getaffinity(0))
        return load(path, RunnerOptions(device, dtype, kv_dtype, num_threads, options.chunk_tokens))

    return LocalBackend(build, options)


def fake_backend(fake: FakeOptions, options: WorkerOptions) -> LocalBackend:
    """The fake engine at set speeds."""
    return LocalBackend(lambda: FakeExecutor(replace(fake, room=options.chunk_tokens)), options)
