"""The parts of benchmarks/engine that only compute: percentiles, ratios, windows, prompts, the table."""

from __future__ import annotations

import argparse
import asyncio
import importlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.engine import report
from benchmarks.engine.__main__ import add_bound
from benchmarks.engine.cells import decode_figures, mixed_figures
from benchmarks.engine.client import StreamRecord
from benchmarks.engine.engines import ENGINES
from benchmarks.engine.lag import between, lag_buckets
from benchmarks.engine.options import merge_overrides, override, parse
from benchmarks.engine.stats import Spread, histogram_percentile, percentile, speed_ratios
from benchmarks.engine.vllm import requirements
from benchmarks.engine.workload import Cell, Prompts, Sizes, rotated, stretch


def test_percentiles_interpolate() -> None:
    assert percentile([3, 1, 2], 0.5) == 2
    assert percentile([1, 2], 0.5) == 1.5
    assert percentile([5], 0.99) == 5
    assert percentile(list(range(101)), 0.99) == 99
    with pytest.raises(ValueError, match="not 0 and"):
        percentile([], 0.5)


@given(st.lists(st.integers(0, 10**6), min_size=1), st.floats(0, 1))
def test_a_percentile_lies_among_the_samples(values: list[int], share: float) -> None:
    assert min(values) <= percentile(values, share) <= max(values)


def test_ratios_are_paired_by_round() -> None:
    ours, theirs = {0: 30.0, 1: 10.0, 2: 5.0}, {0: 10.0, 1: 10.0}
    assert speed_ratios(ours, theirs, higher_is_better=True) == Spread(2.0, 1.0, 3.0)
    assert speed_ratios(ours, theirs, higher_is_better=False) == Spread((1 + 1 / 3) / 2, 1 / 3, 1.0)
    assert speed_ratios(ours, {7: 1.0}, higher_is_better=True) is None


def test_percentiles_of_a_histogram() -> None:
    buckets = {0.01: 50.0, 0.02: 100.0, float("inf"): 100.0}
    assert histogram_percentile(buckets, 0.25) == pytest.approx(0.005)
    assert histogram_percentile(buckets, 0.75) == pytest.approx(0.015)
    assert histogram_percentile({0.01: 0.0, float("inf"): 4.0}, 0.5) == 0.01
    with pytest.raises(ValueError, match="no samples"):
        histogram_percentile({0.01: 0.0, float("inf"): 0.0}, 0.5)


def test_lag_comes_out_of_the_metrics_text() -> None:
    line = 'prfaas_event_loop_lag_seconds_bucket{le="%s"} %s\n'
    first = lag_buckets(line % ("0.01", "3.0") + line % ("+Inf", "4.0") + 'other_bucket{le="1"} 9.0\n')
    last = lag_buckets(line % ("0.01", "5.0") + line % ("+Inf", "9.0"))
    assert between(first, last) == {0.01: 2.0, float("inf"): 5.0}


def record(events: list[float], num_tokens: int, sent_at: float = 0.0) -> StreamRecord:
    return StreamRecord(sent_at=sent_at, events=events, ended_at=events[-1], num_tokens=num_tokens)


def test_a_lone_stream_decodes_at_tokens_over_time() -> None:
    figures = decode_figures([record([1.0, 1.5, 2.0], 3)])
    assert figures["tokens_per_s"] == pytest.approx(2.0)
    assert figures["tpot_s"] == pytest.approx(0.5)
    assert figures["total_tokens_per_s"] == pytest.approx(1.5)


def test_only_the_time_in_which_all_run_counts() -> None:
    slow = [float(n) for n in range(1, 12)]  # 1 token/s from 1 to 11
    fast = [5 + n / 4 for n in range(9)]  # 4 tokens/s from 5 to 7
    figures = decode_figures([record(slow, 11), record(fast, 9)])
    assert figures["tokens_per_s"] == pytest.approx((2 + 8) / 2)


def test_tokens_without_text_of_their_own_count() -> None:
    assert decode_figures([record([1.0, 2.0, 3.0], 5)])["tokens_per_s"] == pytest.approx(2.0)


def test_streams_one_after_the_other_are_measured_over_the_whole() -> None:
    figures = decode_figures([record([1.0, 2.0], 2), record([3.0, 4.0], 2)])
    assert figures["tokens_per_s"] == pytest.approx(3 / 3)
    with pytest.raises(ValueError, match="fewer than two"):
        decode_figures([record([1.0], 1)])


def test_the_gap_that_is_open_at_the_first_token_belongs_to_the_prefill() -> None:
    stream = record([1.0, 1.1, 1.2, 1.3, 3.3, 5.3, 5.4], 7)
    long = StreamRecord(sent_at=1.35, events=[4.35], ended_at=4.36, num_tokens=1)
    figures = mixed_figures([stream], long, 300)
    assert figures["ttft_s"] == pytest.approx(3.0)
    assert figures["prefill_tokens_per_s"] == pytest.approx(100)
    assert figures["quiet_itl_p99_s"] == pytest.approx(0.1)
    assert figures["itl_p50_s"] == pytest.approx(2.0)
    assert figures["itl_p50_ratio"] == pytest.approx(20)


async def test_waiting_for_events_ends_with_the_stream() -> None:
    watched = StreamRecord()
    waiting = asyncio.ensure_future(watched.wait_events(2))
    await asyncio.sleep(0)
    watched.events.append(1.0)
    watched.progress.set()
    await asyncio.sleep(0)
    assert not waiting.done()
    watched.ended_at = 2.0
    watched.progress.set()
    await waiting


def test_cells_and_orders() -> None:
    assert str(Cell.parse("decode-16")) == "decode-16"
    assert Cell.parse("mixed") == Cell("mixed")
    with pytest.raises(ValueError, match="decode-STREAMS"):
        Cell.parse("decode-0")
    assert [rotated("abc", n) for n in (0, 1, 3)] == [["a", "b", "c"], ["b", "c", "a"], ["a", "b", "c"]]


def test_prompts_are_exact_and_do_not_begin_alike(smollm2_dir: Path) -> None:
    prompts = Prompts(smollm2_dir)
    assert len(prompts.take(6000, (0, "prefill-6000", 0))) == 6000
    asked = [tuple(p) for n in range(3) for p in prompts.several(16, 32, (n, "decode-16"))]
    assert len({p[:16] for p in asked}) == len(asked)
    assert stretch((1, "a", 2), 100) == stretch((1, "a", 2), 100)


def test_options() -> None:
    args = parse(
        ["--render", "x.json", "--cells", "decode-2", "--set", "batch.token_budget=64", "--set", "engine.dtype=float32"]
    )
    assert args.set == {"batch": {"token_budget": 64}, "engine": {"dtype": "float32"}}
    assert merge_overrides([override("a.b=1"), override("a.b=2")]) == {"a": {"b": 2}}
    with pytest.raises(SystemExit):
        parse(["--render", "x.json", "--cells", "decode"])


BENCHMARKS = [
    "benchmarks.bench", "benchmarks.demo", "benchmarks.overlap", "benchmarks.engine.options", "benchmarks.engine.lag",
    "benchmarks.tiny_hybrid.train", "benchmarks.tiny_hybrid.evaluate",
]  # fmt: skip


@pytest.mark.parametrize("module", BENCHMARKS)
def test_help_explains_every_option_and_shows_its_default(module: str, monkeypatch: Any, capsys: Any) -> None:
    parsers: list[argparse.ArgumentParser] = []
    made = argparse.ArgumentParser.parse_args
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", lambda p, argv: parsers.append(p) or made(p, argv))
    loaded = importlib.import_module(module)
    with pytest.raises(SystemExit):
        (loaded.parse if module.endswith("options") else loaded.main)(["--help"])
    (parser,), text = parsers, " ".join(capsys.readouterr().out.split())
    assert len(parser.description or "") > 60
    for action in parser._actions[1:]:
        assert action.help, action
        if isinstance(action.default, int | float) and action.default not in (0, False):
            assert f"(default: {action.default})" in text, action


def test_requirements_leave_out_what_does_not_exist() -> None:
    metadata = "\n".join(
        [
            "Name: x",
            "Requires-Dist: numpy",
            "Requires-Dist: torch==2.13.0+cpu",
            "Requires-Dist: torchvision",
            'Requires-Dist: six; python_version < "3"',
            'Requires-Dist: pandas; extra == "bench"',
            'Requires-Dist: lark==1.2; python_version > "3"',
        ]
    )
    assert requirements(metadata) == ["numpy", "lark==1.2"]


def test_the_bound_is_bandwidth_over_the_weights_bytes() -> None:
    about = {"num_weights": 100_000_000, "packed": {"exact": {"bytes": 200_000_000}}}
    for engine, fraction in (("ours", 0.25), ("ours-int8", 0.125), ("llama-f32", 0.5)):
        line: dict[str, Any] = {"cell": "decode-1", "figures": {"tokens_per_s": 10.0}}
        add_bound(line, ENGINES[engine], about, read_bps=8e9)
        assert line["figures"]["bound_fraction"] == pytest.approx(fraction)


def test_the_overview_holds_ours_against_the_best_of_its_kind() -> None:
    """Rates and times each in their direction; an engine that rounds is no rival."""
    figures: dict[str, list[dict[str, float]]] = {
        "ours": [{"ttft_s": 2.0, "itl_p99_s": 0.05}, {"ttft_s": 4.0, "itl_p99_s": 0.05}],
        "ours-int8": [{"ttft_s": 0.1}],
        "slow": [{"ttft_s": 9.0, "itl_p99_s": 0.4}, {"ttft_s": 9.0, "itl_p99_s": 0.4}],
        "fast": [{"ttft_s": 1.0, "itl_p99_s": 0.5}, {"ttft_s": 3.0, "itl_p99_s": 0.5}],
        "q8": [{"ttft_s": 0.5}],
    }
    records: list[report.Record] = [
        {"model": "m", "engine": engine, "round": n, "cell": "mixed", "figures": each}
        for engine, rounds in figures.items()
        for n, each in enumerate(rounds)
    ]
    for engine, rate in (("ours", 10.0), ("slow", 5.0), ("fast", 8.0), ("q8", 99.0)):
        figure = {"tokens_per_s": rate}
        records.append({"model": "m", "engine": engine, "round": 0, "cell": "decode-4", "figures": figure})
    kinds = dict.fromkeys(("ours", "slow", "fast"), "float32") | {"ours-int8": "int8", "q8": "q8_0"}
    engines = {name: f"an engine ({kind})" for name, kind in kinds.items()}
    text = report.overview({"engines": engines, "models": {"m": {}}, "records": records})
    assert "| m | mixed: TTFT of the long prompt, s | 3.00 | 2.00 (fast) | 0.62x (0.50-0.75) |" in text
    assert "| m | ITL p99 meanwhile, ms | 50 | 400 (slow) | 8.00x (8.00-8.00) |" in text
    assert "| m | decode, 4 streams, tokens/s | 10.0 | 8.0 (fast) | 1.25x (1.25-1.25) |" in text
    assert text.index("ours is 1.25 times as fast") < text.index("| model |")


def test_the_report_shows_medians_and_ratios() -> None:
    rates = {"ours": (10.0, 12.0, 11.0), "peer": (10.0, 10.0, 10.0)}
    records: list[report.Record] = [
        {"model": "m", "engine": engine, "round": n, "cell": "decode-4", "figures": {"tokens_per_s": v}}
        for engine, values in rates.items()
        for n, v in enumerate(values)
    ]
    records.append({"model": "m", "engine": "peer", "round": 0, "cell": "prefill-512", "error": "gone"})
    records.append({"model": "m", "engine": "ours", "round": 0, "cell": "prefill-512", "figures": {"tokens_per_s": 9}})
    text = report.table(records, "m")
    assert "| decode, 4 streams, tokens/s | **11.0** (10.0-12.0) | 10.0; 1.10x (1.00-1.20) |" in text
    assert "| prefill, 512 tokens, tokens/s | **9** | failed |" in text
    ratios = [r["ours_times_as_fast"] for r in report.summary(records) if r["engine"] == "peer"]
    assert ratios == [{"median": 1.1, "low": 1.0, "high": 1.2}]
    document = {
        "machine": {"cores_used": 2}, "records": records, "engines": {}, "skipped": {"x": "why"}, "rounds": 3,
        "sizes": vars(Sizes()),
        "models": {"m": {"num_weights": 1e6, "bandwidth": [{"read": 1e9}], "texts": {"ours": "abc", "peer": "abd"}}},
    }  # fmt: skip
    text = report.markdown(document)
    assert "- x: why" in text
    assert "peer 2 of 3 characters" in text
    assert "m, peer, round 0, prefill-512: gone" in text
