"""`make bench-engine`: our engine against what people run, cell by cell, engines alternating round by round.

Writes a JSON file after each engine of each round (an interrupted run keeps what it has) and a markdown section beside
it. `--engines`, `--models`, `--cells` and `--rounds` choose; `--render FILE` only writes the markdown again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.cluster import prfaas_home
from benchmarks.engine import machine, report
from benchmarks.engine.cells import run_cell, together
from benchmarks.engine.client import BadAnswer, Client, get_ready
from benchmarks.engine.engines import ENGINES, Engine, Setting, Unavailable, make_server
from benchmarks.engine.options import parse, sizes_of
from benchmarks.engine.packed import packed
from benchmarks.engine.server import CannotStart
from benchmarks.engine.workload import Cell, Prompts, rotated

Document = dict[str, Any]
START_TIMEOUT_S = 900.0
WARM_PROMPT, WARM_OUTPUT = 300, 8
AGREE_PROMPT, AGREE_OUTPUT = 24, 32


def main(argv: list[str] | None = None) -> int:
    """Measure, or render what was measured."""
    args = parse(argv)
    if args.render is not None:
        document = json.loads(args.render.read_text())
        sys.stdout.write(report.markdown(document))
        return 0
    setting = Setting(
        cache=prfaas_home() / "bench",
        cpus=tuple(args.cpus or sorted(os.sched_getaffinity(0))),
        cells=tuple(map(Cell.parse, args.cells)),
        sizes=sizes_of(args),
        ours=args.set,
        say=say,
    )
    setting.cache.mkdir(parents=True, exist_ok=True)
    document = new_document(args, setting)
    models = [prfaas_home() / "models" / name for name in args.models]
    engines = available([ENGINES[name] for name in args.engines], models, setting, document)
    for number in range(args.rounds):
        for model in models:
            measure_round(number, model, engines, setting, document, args.out)
    say(f"wrote {args.out} and {args.out.with_suffix('.md')}")
    return 0


def new_document(args: argparse.Namespace, setting: Setting) -> Document:
    """Everything but the figures."""
    return {
        "machine": machine.facts(setting.cpus),
        "sizes": vars(setting.sizes),
        "rounds": args.rounds,
        "ours": setting.ours,
        "engines": {},
        "skipped": {},
        "models": {},
        "records": [],
    }


def available(engines: list[Engine], models: list[Path], setting: Setting, document: Document) -> list[Engine]:
    """Build and write what is missing, before anything is measured; engines that no model can have are left out."""
    found = []
    for engine in engines:
        reasons = [why for model in models if (why := reason_against(engine, model, setting)) is not None]
        if len(reasons) == len(models):
            document["skipped"][engine.name] = reasons[0]
            say(f"{engine.name} is left out: {reasons[0]}")
        else:
            document["engines"][engine.name] = f"{engine.about} ({engine.precision})"
            found.append(engine)
    return found


def reason_against(engine: Engine, model: Path, setting: Setting) -> str | None:
    """Why this engine cannot serve this model here; None when it can."""
    with tempfile.TemporaryDirectory(prefix="prfaas-") as folder:
        try:
            make_server(engine, model, setting, Path(folder))
        except Unavailable as error:
            return str(error)
    return None


def measure_round(
    number: int, model: Path, engines: list[Engine], setting: Setting, document: Document, out: Path
) -> None:
    """Each engine once, in the order of the round; the files are written after each."""
    about = document["models"].setdefault(
        model.name,
        {"num_weights": machine.num_weights(model), "packed": packed(model), "bandwidth": [], "texts": {}},
    )
    bandwidth = machine.bandwidth(4 * about["num_weights"], setting.cpus)
    about["bandwidth"].append(bandwidth)
    say(f"round {number}, {model.name}: memory reads {bandwidth['read'] / 1e9:.1f} GB/s")
    prompts = Prompts(model)
    order = rotated([e.name for e in engines], number)
    for engine in (ENGINES[name] for name in order):
        for record in run_engine(engine, model, number, prompts, setting, about):
            record = {"model": model.name, "engine": engine.name, "round": number, **record}
            add_bound(record, engine, about, bandwidth["read"])
            document["records"].append(record)
        document["summary"] = report.summary(document["records"])
        write(document, out)


def run_engine(
    engine: Engine, model: Path, number: int, prompts: Prompts, setting: Setting, about: dict[str, Any]
) -> list[report.Record]:
    """Start, warm up, run every cell, stop. An engine that does not start gives one failed record."""
    with tempfile.TemporaryDirectory(prefix="prfaas-") as folder:
        try:
            server = make_server(engine, model, setting, Path(folder))
            began = time.monotonic()
            server.start(START_TIMEOUT_S)
        except (Unavailable, CannotStart) as error:
            say(f"{engine.name}: {error}")
            return [{"cell": "start", "error": str(error).splitlines()[-1][:300]}]
        try:
            return asyncio.run(_cells(engine, server.url, began, number, prompts, setting, about))
        finally:
            server.stop()


async def _cells(
    engine: Engine, url: str, began: float, number: int, prompts: Prompts, setting: Setting, about: dict[str, Any]
) -> list[report.Record]:
    records: list[report.Record] = []
    async with Client(url) as client:
        try:
            await client.stream(prompts.take(8, (0, "first", 0)), 1)
            records.append({"cell": "start", "figures": {"start_s": time.monotonic() - began}})
            await warm_up(client, prompts, setting, number)
            if engine.name.startswith("ours"):
                await get_ready(url)
                records.append({"cell": "ready", "figures": {"ready_s": time.monotonic() - began}})
            text = (await client.stream(prompts.take(AGREE_PROMPT, (0, "agree", 0)), AGREE_OUTPUT)).text
            about["texts"].setdefault(engine.name, text)
        except BadAnswer as error:
            say(f"{engine.name}, warming up: {error}")
            return [*records, {"cell": "warm-up", "error": str(error)}]
        for cell in setting.cells:
            try:
                is_static = engine.is_static
                figures = await run_cell(client, cell, prompts, setting.sizes, number, is_static=is_static)
                records.append({"cell": str(cell), "figures": figures})
                shown = ", ".join(f"{k} {v:.3g}" for k, v in figures.items())
                say(f"round {number}  {engine.name:16s} {cell!s:13s} {shown}")
            except (BadAnswer, ValueError) as error:
                records.append({"cell": str(cell), "error": str(error)})
                say(f"round {number}  {engine.name:16s} {cell!s:13s} failed: {error}")
    return records


async def warm_up(client: Client, prompts: Prompts, setting: Setting, number: int) -> None:
    """Touch what is made on first use: kernels, buffers, the widest batch."""
    widest = max([1, *(c.size for c in setting.cells if c.kind == "decode")])
    await client.stream(prompts.take(WARM_PROMPT, (number, "warm", 0)), 1)
    await together(client, prompts.several(widest, 16, (number, "warm-all")), WARM_OUTPUT)


def add_bound(record: report.Record, engine: Engine, about: dict[str, Any], read_bps: float) -> None:
    """The share of the memory bound, where one stream decodes alone."""
    if record["cell"] == "decode-1" and "figures" in record:
        ours = about["packed"].get({"ours": "exact", "ours-int8": "int8"}.get(engine.name), {})
        bound = read_bps / (ours.get("bytes") or engine.bytes_per_weight * about["num_weights"])
        record["figures"]["bound_fraction"] = record["figures"]["tokens_per_s"] / bound


def write(document: Document, out: Path) -> None:
    """Both files, each complete or as it was."""
    for path, text in ((out, json.dumps(document, indent=1)), (out.with_suffix(".md"), report.markdown(document))):
        partial = path.with_name(f".{path.name}.part")
        partial.write_text(text)
        partial.rename(path)


def say(line: str) -> None:
    """Progress, for people."""
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {line}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
