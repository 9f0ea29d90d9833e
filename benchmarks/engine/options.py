"""The command line of the benchmark."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from benchmarks.cli import NAMED, make_parser
from benchmarks.cluster import prfaas_home
from benchmarks.engine.engines import DEFAULT_ENGINES, ENGINES
from benchmarks.engine.workload import DEFAULT_CELLS, Cell, Sizes

MODELS = ("smollm2-135m-instruct", "gemma3-270m")
QUICK = Sizes(decode_prompt=16, decode_output=8, num_streams=2, quiet_output=6, long_prompt=400)
QUICK_CELLS = ("decode-1", "decode-2", "prefill-128", "mixed")

DESCRIPTION = """The engine of decoded (local prefill and decode, no network) against transformers, vLLM and llama.cpp.

Every engine serves the same weights on the same cores to the same client; rounds alternate. Prints a table for each
model (tokens/s, seconds and milliseconds as its lines say) and how many times as fast ours was.
"""


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Validated options. `set` is {section: {key: value}}."""
    parser = make_parser("make bench-engine ARGS='...'", DESCRIPTION)
    add = parser.add_argument
    engines = f"in the order of round 0; there are {', '.join(sorted(ENGINES))}"
    add("--engines", nargs="+", metavar="NAME", choices=sorted(ENGINES), default=list(DEFAULT_ENGINES), help=engines)
    add("--models", nargs="+", metavar="NAME", default=list(MODELS), help=NAMED)
    cells = f"decode-STREAMS, prefill-TOKENS or mixed (default: {' '.join(DEFAULT_CELLS)})"
    add("--cells", nargs="+", metavar="CELL", help=cells)
    add("--rounds", type=int, default=3, help="starts of every engine; figures are medians over them")
    add("--cpus", type=int, nargs="+", metavar="CORE", help="core numbers for the engines (default: all allowed)")
    add("--out", type=Path, default=prfaas_home() / "bench" / "engine.json", help="JSON; the markdown lies beside it")
    keys = "a key of decoded's configuration; may be given again"
    add("--set", type=override, action="append", default=[], metavar="SECTION.KEY=VALUE", help=keys)
    add("--quick", action="store_true", help="a tiny workload that only shows that everything works")
    add("--render", type=Path, metavar="JSON", help="print the markdown of an earlier run and end")
    for field in fields(Sizes):
        what = f"{field.metadata['help']} (default: {field.default}; {getattr(QUICK, field.name)} with --quick)"
        add(f"--{field.name.replace('_', '-')}", type=int, metavar="NUM", help=what)
    args = parser.parse_args(argv)
    args.cells = args.cells or list(QUICK_CELLS if args.quick else DEFAULT_CELLS)
    for cell in args.cells:
        try:
            Cell.parse(cell)
        except ValueError as error:
            parser.error(str(error))
    for name in args.models:
        if args.render is None and not (prfaas_home() / "models" / name / "config.json").is_file():
            parser.error(f"model {name} is missing: run `make model MODEL={name}` first")
    args.set = merge_overrides(args.set)
    return args


def sizes_of(args: argparse.Namespace) -> Sizes:
    """The workload's sizes: --quick or the defaults, then what was named."""
    base = QUICK if args.quick else Sizes()
    named = {f.name: getattr(args, f.name) for f in fields(Sizes) if getattr(args, f.name) is not None}
    return Sizes(**{**vars(base), **named})


def override(text: str) -> tuple[str, str, Any]:
    """ "batch.token_budget=64" -> ("batch", "token_budget", 64). Raises argparse.ArgumentTypeError."""
    path, equals, value = text.partition("=")
    section, dot, key = path.partition(".")
    if not (equals and dot and key):
        raise argparse.ArgumentTypeError(f"{text!r} is not SECTION.KEY=VALUE")
    try:
        return section, key, json.loads(value)
    except ValueError:
        return section, key, value


def merge_overrides(overrides: Sequence[tuple[str, str, Any]]) -> dict[str, dict[str, Any]]:
    """{section: {key: value}}; the last of a key wins."""
    merged: dict[str, dict[str, Any]] = {}
    for section, key, value in overrides:
        merged.setdefault(section, {})[key] = value
    return merged
