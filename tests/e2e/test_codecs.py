"""Lossy codecs end to end: checked with the real model first, named in every answer, refused without a good report."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cluster import make_cluster, running_cluster
from benchmarks.text import real_text
from decoded.codec_check import prompts_of
from decoded.codec_report import CodecReport, read, report_path, store


@pytest.fixture(scope="module")
def state_dir(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest.fixture(scope="module")
def reports(smollm2_dir: Path, state_dir: Path) -> list[dict[str, Any]]:
    config, text = state_dir / "decoded.toml", state_dir / "text"
    text.write_text(real_text(20_000))
    config.write_text(
        f'[node]\nstate_dir = "{state_dir}"\n[model]\npath = "{smollm2_dir}"\n[engine]\nthreads = 1\n', encoding="utf-8"
    )
    command = [sys.executable, "-m", "decoded.ctl", "codec", "check", "--config", str(config), "--text", str(text)]
    command += [
        "--prompts",
        "2",
        "--prompt-tokens",
        "300",
        "--codec",
        "q8",
        "--codec",
        "q4",
        "--codec",
        "zstd",
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_check_tells_what_a_codec_costs_and_what_it_does(reports) -> None:
    q8, q4, zstd = reports
    assert [r["codec"] for r in reports] == ["q8", "q4", "zstd"]
    assert all(r["num_prompts"] == 2 and r["num_tokens"] == 256 for r in reports)
    assert zstd["top1_agreement"] == zstd["greedy_agreement"] == 1.0
    assert zstd["kl_max"] == 0.0
    assert zstd["perplexity"] == zstd["perplexity_raw"] == q4["perplexity_raw"]
    assert q8["top1_agreement"] >= 0.99
    assert 0 < q8["kl_mean"] < 1e-3 < q4["kl_mean"] < 0.05
    assert q4["top1_agreement"] > 0.9
    assert q4["ratio"] < 0.15 < q8["ratio"] < 0.27 < zstd["ratio"] < 0.9
    assert all(r["encode_mb_s"] > 0 and r["decode_mb_s"] > 0 for r in reports)


def lossy(codec: str, state_dir: Path, min_agreement: float = 0.99) -> dict[str, Any]:
    return {
        "stream": {"codec": codec},
        "node": {"state_dir": str(state_dir)},
        "codec": {"min_agreement": min_agreement},
    }


def test_the_codec_is_named_and_bytes_are_fewer(smollm2_dir, state_dir, reports) -> None:
    body = {"prompt": real_text(6000, skip=5000), "max_tokens": 8, "temperature": 0}
    with running_cluster(smollm2_dir, decoded=lossy("q8", state_dir)) as cluster:
        local = cluster.post("/v1/completions", body, {"X-Prfaas-Route": "local"})
        remote = cluster.post("/v1/completions", body, {"X-Prfaas-Timing": "1"})
    assert remote["prfaas"]["route"] == "remote"
    assert remote["prfaas"]["codec"] == "q8"
    assert remote["prfaas"]["wire_bytes"] < 0.27 * remote["prfaas"]["raw_bytes"]
    assert remote["choices"][0]["text"][:10] == local["choices"][0]["text"][:10]


@pytest.mark.parametrize(
    ("codec", "min_agreement", "has_report", "message"),
    [
        ("q8", 0.99, False, "was not checked with this model as it is served"),
        ("q4", 1.0, True, "below codec.min_agreement = 1"),
    ],
)
def test_decoded_does_not_start_without_a_good_report(
    smollm2_dir, state_dir, reports, tmp_path, codec, min_agreement, has_report, message
) -> None:
    folder = state_dir if has_report else tmp_path / "empty"
    folder.mkdir(exist_ok=True)
    cluster = make_cluster(tmp_path, smollm2_dir, decoded=lossy(codec, folder, min_agreement))
    cluster.decoded.start()
    assert cluster.decoded.process.wait(120) == 3
    assert message in cluster.decoded.log_path.read_text()


def report(**changes: Any) -> CodecReport:
    numbers = dict.fromkeys(("num_prompts", "num_tokens"), 1)
    names = ("ratio", "ratio_bf16", "encode_mb_s", "decode_mb_s", "top1_agreement", "greedy_agreement")
    floats = dict.fromkeys((*names, "perplexity_raw", "perplexity", "kl_mean", "kl_max"), 0.5)
    return CodecReport(
        **{"codec": "q8", "parameters": "p", "identity": {"a": "b"}, "text": "t", **numbers, **floats, **changes}
    )


def test_reports_outlive_the_process_and_damaged_ones_are_refused(tmp_path) -> None:
    path = store(tmp_path, report())
    assert path == report_path(tmp_path, "q8", {"a": "b"})
    assert read(path) == report()
    assert read(tmp_path / "none") is None
    for text in (
        "{",
        "[]",
        json.dumps(asdict(report()) | {"more": 1}),
        json.dumps(asdict(report()) | {"top1_agreement": "1"}),
    ):
        path.write_text(text)
        with pytest.raises(Exception, match="is not a report of `decodectl codec check`"):
            read(path)


def test_prompts_are_spread_over_the_text() -> None:
    tokens = list(range(10_000))
    found = prompts_of(tokens, 4, 300)
    assert [len(p) for p in found] == [428] * 4
    assert [p[0] for p in found] == [0, 3190, 6380, 9570]
    assert len(prompts_of(tokens[:500], 4, 300)) == 1
    with pytest.raises(ValueError, match="the text has 100 tokens, at least 428 are needed"):
        prompts_of(tokens[:100], 4, 300)
