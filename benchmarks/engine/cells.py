"""Runs one cell against one running engine and returns its figures. Definitions: method.md, beside this file.

decode     tokens per second of all streams while all of them run
prefill    prompt tokens over TTFT of a lone request for one token
mixed      streams run; a long prompt arrives; its TTFT, and the streams' ITL before and meanwhile
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence

from benchmarks.engine.client import BadAnswer, Client, StreamRecord
from benchmarks.engine.stats import percentile
from benchmarks.engine.workload import STREAM_OUTPUT, Cell, Prompts, Sizes

Figures = dict[str, float]
Watch = Callable[[str], Awaitable[None]]


async def run_cell(
    client: Client, cell: Cell, prompts: Prompts, sizes: Sizes, number: int, *, is_static: bool = False
) -> Figures:
    """The figures of `cell` in round `number`. Raises BadAnswer, ValueError when too few tokens came."""
    if cell.kind == "decode":
        asked = prompts.several(cell.size, sizes.decode_prompt, (number, str(cell)))
        return decode_figures(await together(client, asked, sizes.decode_output))
    if cell.kind == "prefill":
        record = await client.stream(prompts.take(cell.size, (number, str(cell), 0)), 1)
        return {"tokens_per_s": cell.size / record.ttft_s, "ttft_s": record.ttft_s}
    return await run_mixed(client, prompts, sizes, number, is_static=is_static)


async def together(client: Client, asked: Sequence[Sequence[int]], max_tokens: int) -> list[StreamRecord]:
    """All prompts at once; when one fails the others are cancelled, so that they do not disturb what comes next."""
    tasks = [asyncio.ensure_future(client.stream(p, max_tokens)) for p in asked]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await _cancel(tasks)


def decode_figures(records: Sequence[StreamRecord]) -> Figures:
    """Rates within the window in which every stream runs; when there is none, over the whole.

    Raises ValueError when a stream has fewer than two text events.
    """
    if any(len(r.events) < 2 for r in records):
        raise ValueError("a stream gave fewer than two pieces of text: nothing to measure between")
    begin, end = max(r.events[0] for r in records), min(r.events[-1] for r in records)
    is_overlapping = end > begin
    if not is_overlapping:
        begin, end = min(r.events[0] for r in records), max(r.events[-1] for r in records)
    num_tokens = 0.0
    for r in records:
        tokens_per_event = (r.num_tokens - 1) / (len(r.events) - 1)
        num_tokens += tokens_per_event * sum(begin < at <= end for at in r.events)
    gaps = [b - a for r in records for a, b in r.gaps if not is_overlapping or (a >= begin and b <= end)]
    whole = max(r.events[-1] for r in records) - min(r.sent_at for r in records)
    return {
        "tokens_per_s": num_tokens / (end - begin),
        "total_tokens_per_s": sum(r.num_tokens for r in records) / whole,
        "tpot_s": percentile([(r.events[-1] - r.events[0]) / (r.num_tokens - 1) for r in records], 0.5),
        "itl_p50_s": percentile(gaps, 0.5),
        "itl_p99_s": percentile(gaps, 0.99),
    }


def mixed_figures(streams: Sequence[StreamRecord], long: StreamRecord, num_prompt_tokens: int) -> Figures:
    """Gaps that ended before the long prompt was sent are quiet; those that touch its prefill are mixed."""
    sent_at, first_at = long.sent_at, long.first_at
    gaps = [gap for r in streams for gap in r.gaps]
    quiet = [b - a for a, b in gaps if b <= sent_at]
    mixed = [b - a for a, b in gaps if b > sent_at and a < first_at]
    tokens = sum(sent_at < at <= first_at for r in streams for at in r.events)
    figures = {
        "ttft_s": long.ttft_s,
        "prefill_tokens_per_s": num_prompt_tokens / long.ttft_s,
        "meanwhile_tokens_per_s": tokens / long.ttft_s,
        "quiet_itl_p50_s": percentile(quiet, 0.5),
        "quiet_itl_p99_s": percentile(quiet, 0.99),
        "itl_p50_s": percentile(mixed, 0.5),
        "itl_p99_s": percentile(mixed, 0.99),
    }
    figures["itl_p50_ratio"] = figures["itl_p50_s"] / figures["quiet_itl_p50_s"]
    figures["itl_p99_ratio"] = figures["itl_p99_s"] / figures["quiet_itl_p99_s"]
    figures["itl_worst_ratio"] = figures["itl_p99_s"] / figures["quiet_itl_p50_s"]
    return figures


async def run_mixed(
    client: Client, prompts: Prompts, sizes: Sizes, number: int, *, is_static: bool = False, at: Watch | None = None
) -> Figures:
    """The mixed cell; `at` is awaited with "running", "sending" and "done" at those moments.

    A static batch takes nobody in: there the streams are short, and the long prompt waits for their end.
    """
    num_output = 2 * sizes.quiet_output if is_static else STREAM_OUTPUT
    asked = prompts.several(sizes.num_streams, sizes.decode_prompt, (number, "mixed"))
    records = [StreamRecord() for _ in asked]
    tasks = [asyncio.ensure_future(client.stream(p, num_output, r)) for p, r in zip(asked, records, strict=True)]
    at = at or _look_away
    try:
        for record in records:
            await record.wait_events(2)
        await at("running")
        for record in records:
            await record.wait_events(sizes.quiet_output)
        _raise_errors(tasks)
        await at("sending")
        long = await client.stream(prompts.take(sizes.long_prompt, (number, "long", 0)), 1)
        await at("done")
        for record in records:  # the gap that was open at the first token belongs to the prefill
            await record.wait_events(sum(moment <= long.first_at for moment in record.events) + 1)
        _raise_errors(tasks)
    finally:
        await _cancel(tasks)
    return mixed_figures(records, long, sizes.long_prompt)


async def _look_away(_moment: str) -> None:
    pass


def _raise_errors(tasks: Sequence[asyncio.Future[StreamRecord]]) -> None:
    for task in tasks:
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            raise error


async def _cancel(tasks: Sequence[asyncio.Future[StreamRecord]]) -> None:
    for task in tasks:
        task.cancel()
    for task in tasks:
        with contextlib.suppress(asyncio.CancelledError, BadAnswer):
            await task
