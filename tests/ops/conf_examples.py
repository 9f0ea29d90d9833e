"""Writes conf/*.toml again from the models, keeping their values and heads: `python tests/ops/conf_examples.py`."""

from __future__ import annotations

from pathlib import Path

from common.config import load, render
from decoded.config import DecodeConfig
from prefilld.config import PrefillConfig

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = {"prefilld": PrefillConfig, "decoded": DecodeConfig}


def expected(name: str) -> str:
    path = ROOT / "conf" / f"{name}.toml"
    head = path.read_text().split("\n\n", 1)[0]
    config = load(path, EXAMPLES[name], environment="never")
    return f"{head}\n\n{render(config)}"


if __name__ == "__main__":
    for example in EXAMPLES:
        (ROOT / "conf" / f"{example}.toml").write_text(expected(example))
