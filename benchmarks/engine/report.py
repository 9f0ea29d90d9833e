"""From records to text: the summary over rounds, a markdown table for each model, and the section on method.

A record is one cell of one engine in one round: {"model", "engine", "round", "cell", "figures" | "error"}. Pure but for
reading the method's template.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

from benchmarks.engine.stats import Spread, speed_ratios

Record = dict[str, Any]
OVERVIEW = """## At a glance

`1.25x` says that ours is 1.25 times as fast: above 1 ours is ahead, below 1 behind. It is ours over theirs for rates
and theirs over ours for times, paired by round, median (range). "Best other" is the fastest of the engines that compute
in float32 as ours does, neither weights nor products rounded. transformers' static batch takes a long prompt in at its
end only, hence its short gaps meanwhile."""
METHOD = Path(__file__).with_name("method.md")


@dataclass(frozen=True)
class Row:
    """A figure of a kind of cell as the table shows it: shown = figure x scale."""

    kind: str
    figure: str
    title: str
    scale: float = 1.0
    digits: int = 1
    higher_is_better: bool = True
    has_ratio: bool = True
    is_headline: bool = False


ROWS = (
    Row("start", "start_s", "start, s", higher_is_better=False),
    Row("ready", "ready_s", "- until all decode steps are recorded, s", has_ratio=False),
    Row("decode", "tokens_per_s", "decode, {size} streams, tokens/s", is_headline=True),
    Row("decode", "itl_p99_s", "- ITL p99, ms", 1e3, 0, higher_is_better=False),
    Row("decode", "bound_fraction", "- fraction of the memory bound", 1, 2, has_ratio=False),
    Row("prefill", "tokens_per_s", "prefill, {size} tokens, tokens/s", 1, 0, is_headline=True),
    Row("prefill", "ttft_s", "- TTFT, s", 1, 2, higher_is_better=False),
    Row("mixed", "ttft_s", "mixed: TTFT of the long prompt, s", 1, 2, higher_is_better=False, is_headline=True),
    Row("mixed", "prefill_tokens_per_s", "- its prefill rate, tokens/s", 1, 0),
    Row("mixed", "meanwhile_tokens_per_s", "- the streams' tokens/s meanwhile"),
    Row("mixed", "quiet_itl_p50_s", "- ITL p50 before, ms", 1e3, 0, higher_is_better=False),
    Row("mixed", "quiet_itl_p99_s", "- ITL p99 before, ms", 1e3, 0, higher_is_better=False),
    Row("mixed", "itl_p50_s", "- ITL p50 meanwhile, ms", 1e3, 0, higher_is_better=False),
    Row("mixed", "itl_p99_s", "- ITL p99 meanwhile, ms", 1e3, 0, higher_is_better=False, is_headline=True),
    Row("mixed", "itl_worst_ratio", "- ITL p99 meanwhile / p50 before", 1, 1, has_ratio=False),
)


def series(records: Sequence[Record], *, model: str, engine: str, cell: str, figure: str) -> dict[int, float]:
    """Round -> value of one figure; rounds in which the cell failed are missing."""
    return {
        r["round"]: r["figures"][figure]
        for r in records
        if (r["model"], r["engine"], r["cell"]) == (model, engine, cell) and figure in r.get("figures", {})
    }


def summary(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Median, least and greatest of each figure over the rounds, and how many times as fast ours is, by round."""
    lines = []
    for model, engine, cell in dict.fromkeys((r["model"], r["engine"], r["cell"]) for r in records):
        names = {n for r in records if r["cell"] == cell for n in r.get("figures", {})}
        for figure in sorted(names):
            values = series(records, model=model, engine=engine, cell=cell, figure=figure)
            if (spread := Spread.of(list(values.values()))) is None:
                continue
            line = {"model": model, "engine": engine, "cell": cell, "figure": figure, **vars(spread)}
            ours = series(records, model=model, engine="ours", cell=cell, figure=figure)
            is_rate = "per_s" in figure
            if engine != "ours" and (ratio := speed_ratios(ours, values, higher_is_better=is_rate)) is not None:
                line["ours_times_as_fast"] = vars(ratio)
            lines.append(line)
    return lines


def table(records: Sequence[Record], model: str) -> str:
    """Cells by engines. In each: the median, and ours over it (theirs over ours for times) with its range."""
    mine = [r for r in records if r["model"] == model]
    engines = list(dict.fromkeys(r["engine"] for r in mine))
    engines.sort(key=lambda name: name != "ours")
    lines = ["| | " + " | ".join(engines) + " |", "|---|" + "---|" * len(engines)]
    for cell in dict.fromkeys(r["cell"] for r in mine):
        kind, _, size = cell.partition("-")
        for row in (r for r in ROWS if r.kind == kind):
            entries = [_entry(mine, model, engine, cell, row) for engine in engines]
            if any(entries):
                title = row.title.format(size=size)
                lines.append(f"| {title} | " + " | ".join(e or "" for e in entries) + " |")
    return "\n".join(lines)


def overview(document: dict[str, Any]) -> str:
    """Ours against the best other of each cell: of the engines that round neither weights nor products, as ours."""
    exact = [name for name, text in document["engines"].items() if text.endswith("(float32)")]
    others = [name for name in exact if not name.startswith("ours")]
    lines = [OVERVIEW, "", "| model | cell | ours | best other | ours is |", "|---|---|---|---|---|"]
    for model in document["models"]:
        mine = [r for r in document["records"] if r["model"] == model]
        for cell in dict.fromkeys(r["cell"] for r in mine):
            kind, _, size = cell.partition("-")
            for row in (r for r in ROWS if r.kind == kind and r.is_headline):
                title = row.title.removeprefix("- ").format(size=size)
                if found := _against_best(mine, model, cell, row, others):
                    lines.append(f"| {model} | {title} | " + " | ".join(found) + " |")
    return "\n".join(lines)


def _against_best(
    records: Sequence[Record], model: str, cell: str, row: Row, others: Sequence[str]
) -> tuple[str, str, str] | None:
    """Ours, the best of the others by its median, and how many times as fast ours is; None if either has no figure."""
    of = {n: series(records, model=model, engine=n, cell=cell, figure=row.figure) for n in ("ours", *others)}
    medians = {name: spread.median for name, values in of.items() if (spread := Spread.of(list(values.values())))}
    ours = medians.pop("ours", None)
    if ours is None or not medians:
        return None
    best = max(medians, key=lambda name: medians[name] if row.higher_is_better else -medians[name])
    ratio = speed_ratios(of["ours"], of[best], higher_is_better=row.higher_is_better)
    shown = "" if ratio is None else f"{ratio.median:.2f}x ({ratio.low:.2f}-{ratio.high:.2f})"
    return (
        f"{ours * row.scale:.{row.digits}f}",
        f"{medians[best] * row.scale:.{row.digits}f} ({best})",
        shown,
    )


def _entry(records: Sequence[Record], model: str, engine: str, cell: str, row: Row) -> str | None:
    values = series(records, model=model, engine=engine, cell=cell, figure=row.figure)
    spread = Spread.of([v * row.scale for v in values.values()])
    if spread is None:
        failed = any(r["engine"] == engine and r["cell"] == cell and "error" in r for r in records)
        return "failed" if failed and row.has_ratio else None
    text = f"{spread.median:.{row.digits}f}"
    if engine == "ours":
        return f"**{text}**" + (
            f" ({spread.low:.{row.digits}f}-{spread.high:.{row.digits}f})" if len(values) > 1 else ""
        )
    ours = series(records, model=model, engine="ours", cell=cell, figure=row.figure)
    ratio = speed_ratios(ours, values, higher_is_better=row.higher_is_better) if row.has_ratio else None
    if ratio is None:
        return text
    span = f" ({ratio.low:.2f}-{ratio.high:.2f})" if len(values) > 1 else ""
    return f"{text}; {ratio.median:.2f}x{span}"


def markdown(document: dict[str, Any]) -> str:
    """The whole section: method, machine, one table for each model, what was left out."""
    facts, records = document["machine"], document["records"]
    parts = [overview(document), Template(METHOD.read_text()).substitute(_fields(document))]
    parts.append("### Machine\n\n" + "\n".join(f"- {key}: {_plain(value)}" for key, value in facts.items()))
    parts.append("### Engines\n\n" + "\n".join(f"- {name}: {text}" for name, text in document["engines"].items()))
    for model, about in document["models"].items():
        if not any(r["model"] == model for r in records):
            continue
        read = Spread.of([b["read"] / 1e9 for b in about["bandwidth"]])
        note = f"{about['num_weights'] / 1e6:.0f} M weights"
        if read is not None:
            note += f"; memory read at {read.median:.1f} GB/s ({read.low:.1f}-{read.high:.1f}) on these cores"
        for setting, found in about.get("packed", {}).items():
            formats = ", ".join(f"{num} of {name}" for name, num in found["formats"].items())
            note += f"; ours, weights {setting}: {found['bytes'] / 1e6:.0f} MB ({formats})"
        parts.append(f"### {model}\n\n{note}.\n\n{table(records, model)}")
        if texts := agreement(about.get("texts", {})):
            parts.append(texts)
    if document["skipped"]:
        parts.append("### Left out\n\n" + "\n".join(f"- {n}: {why}" for n, why in document["skipped"].items()))
    errors = [
        f"- {r['model']}, {r['engine']}, round {r['round']}, {r['cell']}: {r['error']}" for r in records if "error" in r
    ]
    if errors:
        parts.append("### Failed cells\n\n" + "\n".join(errors))
    return "\n\n".join(parts) + "\n"


def agreement(texts: dict[str, str]) -> str:
    """How far each engine's greedy text of one prompt is ours: the same weights, read the same way."""
    if "ours" not in texts or len(texts) < 2:
        return ""
    ours, parts = texts["ours"], []
    for engine, text in texts.items():
        if engine != "ours":
            same = next(
                (n for n, (a, b) in enumerate(zip(ours, text, strict=False)) if a != b), min(len(ours), len(text))
            )
            parts.append(f"{engine} {'all' if text == ours else f'{same} of {len(ours)} characters'}")
    return "Greedy text of one prompt equal to ours: " + ", ".join(parts) + "."


def _fields(document: dict[str, Any]) -> dict[str, Any]:
    sizes = document["sizes"]
    return {**sizes, "rounds": document["rounds"], "cores": document["machine"]["cores_used"]}


def _plain(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
