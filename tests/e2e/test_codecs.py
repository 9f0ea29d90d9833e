"""Lossy codecs end to end: checked with the real model first, named in every answer, refused without a good report."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cluster import make_cluster, running_cluster
from benchmarks.text import real_text
from common.config_load import parse_text
from common.errors import EXIT_CONFIG, EXIT_STARTUP
from common.fake import FakeOptions
from common.layout import ModelInfo
from decoded.codec_check import answer_of, prompts_of
from decoded.codec_report import PARAMETERS, CodecReport, identity_of, obstacle, read, report_path, store
from decoded.config import DecodeConfig
from decoded.ctl.__main__ import main
from decoded.ctl.codec import reports_text


@pytest.fixture(scope="module")
def state_dir(tmp_path_factory) -> Path:
    """Does not exist before the check makes it."""
    return tmp_path_factory.mktemp("codecs") / "state"


def codec_check(config: Path, text: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "decoded.ctl", "codec", "check", "--config", str(config), "--text", str(text)]
    return subprocess.run([*command, *options], capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def reports(smollm2_dir: Path, state_dir: Path) -> list[dict[str, Any]]:
    config, text = state_dir.parent / "decoded.toml", state_dir.parent / "text"
    text.write_text(real_text(20_000))
    model = f'[model]\npath = "{smollm2_dir}"\n[engine]\nthreads = 1\n'
    config.write_text(f'[node]\nstate_dir = "{state_dir}"\n{model}[codec]\nmin_agreement = 0.98\n')
    codecs = ["--codec", "q8", "--codec", "q4", "--codec", "zstd"]
    done = codec_check(config, text, "--prompts", "2", "--prompt-tokens", "300", *codecs, "--json")
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


def test_the_answer_says_what_a_report_allows_and_where_it_lies(reports, state_dir) -> None:
    q8, q4, zstd = reports
    assert all(Path(r["path"]).parent == state_dir and Path(r["path"]).exists() for r in reports)
    assert (q8["is_lossy"], q8["min_agreement"], q8["passes"]) == (True, 0.98, True)
    assert q4["passes"] == (q4["top1_agreement"] >= 0.98)
    lines = reports_text([q8, q4 | {"passes": False}, zstd | {"path": None}]).splitlines()[-3:]
    top1 = f"{q8['top1_agreement']:.4f}"
    assert lines[0] == f"q8: passes: top1 {top1} is not below codec.min_agreement = 0.98; report in {q8['path']}"
    assert f"q4: does not pass: top1 {q4['top1_agreement']:.4f} is below codec.min_agreement = 0.98;" in lines[1]
    assert lines[2] == "zstd: lossless, may be used without a report; the report was not kept"


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
        ("q8", 0.99, False, "stream.codec: 'q8' is lossy and was not checked with this model as it is served"),
        ("q4", 1.0, True, "below codec.min_agreement = 1"),
    ],
)
def test_decoded_does_not_start_without_a_good_report(
    smollm2_dir, state_dir, reports, tmp_path, codec, min_agreement, has_report, message
) -> None:
    """Found before the model is loaded, and by --check."""
    folder = state_dir if has_report else tmp_path / "empty"
    cluster = make_cluster(tmp_path, smollm2_dir, decoded=lossy(codec, folder, min_agreement))
    cluster.decoded.start()
    assert cluster.decoded.process.wait(60) == EXIT_CONFIG
    told = cluster.decoded.log_path.read_text()
    assert message in told and "loading the model" not in told
    command = [sys.executable, "-m", "decoded", "--config", str(cluster.decoded.write_config()), "--check"]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert checked.returncode == EXIT_CONFIG and message in checked.stderr


def test_what_only_the_loaded_model_shows_is_found_then(smollm2_dir, reports, tmp_path) -> None:
    """A report of the same weights and dtypes whose state has another layout."""
    found = {k: v for k, v in reports[0].items() if k in {f.name for f in fields(CodecReport)}}
    store(tmp_path / "state", CodecReport(**{**found, "identity": found["identity"] | {"layout_digest": "0"}}))
    cluster = make_cluster(tmp_path, smollm2_dir, decoded=lossy("q8", tmp_path / "state"))
    cluster.decoded.start()
    assert cluster.decoded.process.wait(120) == EXIT_STARTUP
    told = cluster.decoded.log_path.read_text()
    assert "was not checked with this model as it is served (no report" in told
    assert "run `decodectl codec check --config FILE --text FILE --codec q8`" in told


@pytest.mark.parametrize(
    ("state", "text", "options", "code", "message"),
    [
        ("a/b", "word " * 999, (), 1, "decodectl codec check: node.state_dir: "),
        ("", "word " * 999, (), 1, "decodectl codec check: node.state_dir must be set in "),
        (
            "a",
            "word " * 99,
            ("--prompt-tokens", "300"),
            1,
            "(--prompt-tokens 300 and 128 to compare on): give a longer",
        ),
        ("a", None, (), 1, "decodectl codec check: [Errno 2] No such file"),
        (
            "a",
            "word",
            ("--prompts", "0"),
            2,
            "decodectl codec check: error: argument --prompts: must be a whole number",
        ),
        ("a", "word", ("--codec", "zip"), 2, "decodectl codec check: error: argument --codec: invalid choice: 'zip'"),
        ("a", "word " * 9000, ("--prompt-tokens", "8100"), 1, "are 8228 tokens, the model takes 8192"),
    ],
)
def test_what_cannot_be_checked_is_refused_before_anything_is_computed(
    smollm2_dir, tmp_path, state, text, options, code, message
) -> None:
    state_dir = str(tmp_path / state) if state else ""
    config, file = tmp_path / "decoded.toml", tmp_path / "text"
    config.write_text(f'[node]\nstate_dir = "{state_dir}"\n[model]\npath = "{smollm2_dir}"\n')
    if text is not None:
        file.write_text(text)
    done = codec_check(config, file, *options)
    assert (done.returncode, done.stdout) == (code, "") and message in done.stderr
    assert "Traceback" not in done.stderr and ": prompt 1 of" not in done.stderr


def test_what_was_found_is_answered_even_if_it_cannot_be_kept(tmp_path, capsys) -> None:
    (tmp_path / "file").touch()
    text = f'[node]\nstate_dir = "{tmp_path}/file"\n[model]\npath = "m"\n'
    found = answer_of(parse_text(text, DecodeConfig, environment="never"), report(top1_agreement=0.995))
    assert (found["path"], found["passes"], found["top1_agreement"]) == (None, True, 0.995)
    assert capsys.readouterr().err.startswith("decodectl codec check: node.state_dir: the report of q8 was not kept: ")


def test_a_wrong_configuration_is_told_line_by_line(tmp_path) -> None:
    config = tmp_path / "decoded.toml"
    config.write_text("[engine]\nthreads = -1\n[node]\nnmae = 'a'\n")
    done = codec_check(config, tmp_path / "text")
    assert done.returncode == 1
    assert done.stderr.startswith(f"decodectl codec check: 3 problems in {config}:\n  ")


def test_the_columns_are_explained(capsys) -> None:
    with pytest.raises(SystemExit):
        main(["codec", "check", "--help"])
    told = capsys.readouterr().out
    header = reports_text([asdict(report()) | {"is_lossy": True, "min_agreement": 0.99, "passes": False, "path": ""}])
    columns = header.splitlines()[0].split()[1:]
    explained = set(told.replace(",", " ").split())
    assert {"top1", "encode_MB/s"} <= set(columns) <= explained


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
        *(
            json.dumps(asdict(report()) | {name: value})
            for name in ("top1_agreement", "kl_max")
            for value in ("1", None, True, math.nan)
        ),
        json.dumps(asdict(report()) | {"top1_agreement": 5.0}),
        "[" * 100_000,
    ):
        path.write_text(text)
        with pytest.raises(Exception, match="is not a report of `decodectl codec check`"):
            read(path)


def test_a_report_is_about_the_weights() -> None:
    info = ModelInfo(
        "m", "w", "c", "t", FakeOptions().layout(), 100, 4096, (2,), {"dtype": "float32", "weights": "exact"}
    )
    assert identity_of(info) != identity_of(replace(info, weights_digest="v"))
    assert identity_of(info) != identity_of(replace(info, numerics=info.numerics | {"weights": "int8"}))


def test_what_shows_without_the_model(tmp_path) -> None:
    known = {"weights_digest": "w"}
    assert "needs a report, which is kept in node.state_dir: set that" in obstacle(None, "q8", known, 0.4)
    assert "was not checked" in obstacle(tmp_path / "none", "q8", known, 0.4)
    good = report(parameters=PARAMETERS, identity=known | {"layout_digest": "l"})
    store(tmp_path, good)
    assert obstacle(tmp_path, "q8", known, 0.4) == ""
    assert "was not checked" in obstacle(tmp_path, "q4", known, 0.4)
    assert "was not checked" in obstacle(tmp_path, "q8", {"weights_digest": "v"}, 0.4)
    assert "at 0.5000 of the positions" in obstacle(tmp_path, "q8", known, 0.6)
    store(tmp_path, replace(good, identity=known | {"layout_digest": "m"}, top1_agreement=0.7))
    assert obstacle(tmp_path, "q8", known, 0.6) == ""
    for path in tmp_path.iterdir():
        path.write_text("[" * 100_000)
    assert "is not a report of `decodectl codec check`" in obstacle(tmp_path, "q8", known, 0.4)


def test_prompts_are_spread_over_the_text() -> None:
    tokens = list(range(10_000))
    found = prompts_of(tokens, 4, 300)
    assert [len(p) for p in found] == [428] * 4
    assert [p[0] for p in found] == [0, 3190, 6380, 9570]
    assert len(prompts_of(tokens[:500], 4, 300)) == 1
    with pytest.raises(ValueError, match=r"the text has 100 tokens, at least 428 are needed .* give a longer one$"):
        prompts_of(tokens[:100], 4, 300)
    with pytest.raises(ValueError, match="give a longer one, or --prompt-tokens 72 at most"):
        prompts_of(tokens[:200], 4, 300)
