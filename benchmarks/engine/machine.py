"""Facts about the machine, and how fast its memory is just now, for the report.

Bandwidth is measured in a process of its own over an array of the weights' size, on the cores the engines get.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

_PROBE = """
import json, sys, time, torch
size, threads = int(sys.argv[1]), int(sys.argv[2])
torch.set_num_threads(threads)
array = torch.ones(size // 4)
other = torch.empty_like(array)
def best(work):
    times = []
    for _ in range(7):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)
array.sum(), other.copy_(array)
print(json.dumps({"read": size / best(lambda: array.sum()), "copy": 2 * size / best(lambda: other.copy_(array))}))
"""


def bandwidth(num_bytes: int, cpus: Sequence[int]) -> dict[str, float]:
    """Bytes per second: `read` is a sum over the array, `copy` counts what is read and what is written; best of 7."""
    env = {**os.environ, "OMP_NUM_THREADS": str(len(cpus))}
    command = ["taskset", "--cpu-list", ",".join(map(str, cpus)), sys.executable, "-c", _PROBE]
    done = subprocess.run([*command, str(num_bytes), str(len(cpus))], env=env, capture_output=True, check=True)
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def facts(cpus: Sequence[int]) -> dict[str, Any]:
    """What a reader must know to compare; nothing that names the host."""
    info = Path("/proc/cpuinfo").read_text()
    fields = dict(line.split("\t: ", 1) for line in info.splitlines() if "\t: " in line.replace("\t\t", "\t"))
    fields = {key.strip(): value for key, value in fields.items()}
    flags = set(fields.get("flags", "").split())
    return {
        "processor": fields.get("model name", platform.processor()),
        "instructions": [f for f in ("avx2", "fma", "f16c", "avx512f", "avx512_bf16", "amx_tile") if f in flags],
        "cores_used": len(cpus),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": _version("torch"),
        "transformers": _version("transformers"),
        "load_before": round(os.getloadavg()[0], 2),
        "date": time.strftime("%Y-%m-%d"),
        "commit": _commit(),
    }


def num_weights(model: Path) -> int:
    """Weights a decode step reads: all of them, but for an input embedding that is not the output's too."""
    from safetensors import safe_open

    config = json.loads((model / "config.json").read_text())
    total = 0
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, framework="numpy") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                if not name.endswith("embed_tokens.weight") or config.get("tie_word_embeddings"):
                    size = 1
                    for length in tensors.get_slice(name).get_shape():
                        size *= length
                    total += size
    return total


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "absent"


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"
