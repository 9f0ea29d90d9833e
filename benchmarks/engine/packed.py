"""What a decode step of ours reads: the bytes of a model's matrices as our kernels keep them.

    python -m benchmarks.engine.packed MODEL_DIRECTORY  prints {"exact": {"bytes": N, "formats": {...}}, "int8": ...}

A process of its own, so that the benchmark's keeps neither the model nor torch's threads.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def packed(model: Path) -> dict[str, Any]:
    """Of both settings of engine.weights; empty where the kernels cannot be made."""
    done = subprocess.run([sys.executable, "-m", __name__, str(model)], capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> int:
    """Print what `packed` returns."""
    from common.engine.kernels import accelerate
    from common.engine.loader import load_model

    found = {}
    for setting, weights in (("exact", "float32"), ("int8", "int8")):
        report = accelerate(load_model(Path(sys.argv[1])).model, weights=weights)
        if not report.reason:
            found[setting] = {"bytes": report.bytes_after, "formats": report.formats}
    sys.stdout.write(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
