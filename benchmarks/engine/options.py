"""The command line of the benchmark."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from benchmarks.cluster import prfaas_home
from benchmarks.engine.engines import DEFAULT_ENGINES, ENGINES
from benchmarks.engine.workload import DEFAULT_CELLS, Cell, Sizes

MODELS = ("smollm2-135m-instruct", "gemma3-270m")
QUICK = Sizes(decode_prompt=16, decode_output=8, num_streams=2, quiet_output=6, long_prompt=400)
QUICK_CELLS = ("decode-1", "decode-2", "prefill-128", "mixed")


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Validated options. `set` is {section: {key: value}}."""
    parser = argparse.ArgumentParser(
        prog="make bench-engine ARGS='...'", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--engines", nargs="+", choices=sorted(ENGINES), default=list(DEFAULT_ENGINES), help="in the order of round 0")
    add("--models", nargs="+", default=list(MODELS), help="names under PRFAAS_HOME/models")
    add("--cells", nargs="+", help=f"decode-STREAMS, prefill-TOKENS, mixed ({' '.join(DEFAULT_CELLS)})")
    add("--rounds", type=int, default=3)
    add("--cpus", type=int, nargs="+", help="core numbers for the engines (all that are allowed)")
    add("--out", type=Path, default=prfaas_home() / "bench" / "engine.json", help="JSON; the markdown lies beside it")
    add(
        "--set",
        type=override,
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="decoded's configuration",
    )
    add("--quick", action="store_true", help="a tiny workload that only shows that everything works")
    add("--render", type=Path, metavar="JSON", help="print the markdown of an earlier run and end")
    for name, default in ((f.name, f.default) for f in fields(Sizes)):
        add(f"--{name.replace('_', '-')}", type=int, help=f"tokens or streams ({default})")
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
