"""What `decodectl plan` refuses of a scenario: unknown keys, numbers that cannot be. All keys are documented."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy as np
import pytest

from common.policy.lengths import Lengths
from common.policy.profile import NODE_KEYS, node_profile
from common.sim.prompts import ARRIVAL_KEYS, WORKLOAD_KEYS
from common.sim.scenario import KEYS, LINK_KEYS, PAPER, SLO_KEYS, scenario
from common.sim.workload import gaps, log_normal
from decoded.ctl.__main__ import main

# A scenario with every number that one may have.
FULL = PAPER | {
    "own": PAPER["own"] | {"decode": {"base_s": 0.02, "per_row_s": 1e-4, "per_context_s": 1e-9, "max_rows": 20}}
    | {"model": {"name": "m", "digest": "d", "max_context": 200_000}},
    "num_homogeneous": 12,
    "workload": PAPER["workload"] | {"low": 1},
    "cache_tokens": 1e6,
    "link": {"rate": "100Gbit/s", "rtt": "10ms", "loss": 1e-9, "data_links": 4, "codec_ratio": 0.7, "changes": [
        {"at": "1s", "rate": "1Gbit/s", "rtt": "1ms", "loss": 1e-8, "data_links": 2}
    ]},
    "arrivals": {"load": 0.8, "cv": 1.0, "swing": 0.1, "period": "1h", "num_requests": 200, "as_recorded": False},
}  # fmt: skip
# Where zero means something.
MAY_BE_ZERO = {
    "state.fixed_bytes", "state.bytes_per_token", "own.prefill.constant_s", "own.prefill.per_token_s",
    "own.prefill.per_square_s", "own.decode.base_s", "own.decode.per_row_s", "own.decode.per_context_s", "num_remote",
    "cache_tokens", "link.rtt", "link.loss", "link.changes[0].at", "link.changes[0].rtt", "link.changes[0].loss",
    "workload.mu", "arrivals.cv", "arrivals.swing", "remote.prefill.points[0][0]",
}  # fmt: skip


def numbers(data, path=()):
    """(name, path) of each number, and of each text that begins with one."""
    if isinstance(data, dict | list):
        for key, value in data.items() if isinstance(data, dict) else enumerate(data):
            yield from numbers(value, (*path, key))
    elif not isinstance(data, bool) and path[0] != "name" and path[-1] not in ("name", "kind", "digest"):
        yield "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in path).lstrip("."), path


def changed(path, value):
    data = copy.deepcopy(FULL)
    target = data
    for part in path[:-1]:
        target = target[part]
    if isinstance(target[path[-1]], str):
        unit = target[path[-1]].lstrip("0123456789.")
        value = f"{value:f}{unit}"
    target[path[-1]] = value
    return data


def test_the_full_scenario_is_one():
    assert scenario(FULL).num_own == 8
    assert set(FULL) == set(KEYS)
    assert set(FULL["link"]) == set(LINK_KEYS)
    assert set(FULL["arrivals"]) == set(ARRIVAL_KEYS)


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), float("-inf"), 0])
@pytest.mark.parametrize(("name", "path"), list(numbers(FULL)), ids=lambda x: x if isinstance(x, str) else "")
def test_numbers_that_cannot_be_are_refused(name, path, value):
    data = changed(path, value)
    if value == 0 and name in MAY_BE_ZERO:
        scenario(data)
        return
    with pytest.raises(ValueError) as e:
        scenario(data)
    # Of a point both numbers are told.
    assert name.rsplit("[", 1)[0].rstrip("]") in str(e.value)
    assert str(value).lstrip("-") in str(e.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lnik": 1}, "lnik: unknown key; did you mean 'link'?"),
        ({"zzz": 1}, "zzz: unknown key; known here: name, own, remote"),
        ({"num_owns": 3}, "num_owns: unknown key; did you mean 'num_own'?"),
        ({"link": {"rate": "1Gbit/s", "lossy": 0.1}}, "link.lossy: unknown key; did you mean 'loss'?"),
        (
            {"link": {"rate": "1Gbit/s", "changes": [{"at": "1s", "los": 0}]}},
            "link.changes[0].los: unknown key; did you mean 'loss'?",
        ),
        (
            {"workload": PAPER["workload"] | {"num_outputs": 256}},
            "workload.num_outputs: unknown key; did you mean 'num_output'?",
        ),
        ({"workload": {"kind": "trace", "file": "x"}}, "workload.path is missing"),
        (
            {"workload": {"kind": "trace", "path": "x", "file": "x"}},
            "workload.file: unknown key; known here: kind, path",
        ),
        ({"workload": {"kind": "trace"}}, "workload.path is missing"),
        ({"workload": {"kind": "trace", "path": ""}}, "workload.path must be text"),
        ({"workload": {"kind": "trace", "path": "."}}, "cannot be read: Is a directory"),
        ({"workload": {"kind": "trace", "path": "no.jsonl"}}, "no.jsonl cannot be read: No such file"),
        ({"workload": {"mu": 1}}, "workload.kind is missing"),
        ({"arrivals": {"loads": 1}}, "arrivals.loads: unknown key; did you mean 'load'?"),
        ({"slo": {"ttfb": "1s"}}, "slo.ttfb: unknown key; did you mean 'ttft'?"),
        ({"state": {"bytes_per_tokens": 1}}, "state.bytes_per_tokens: unknown key; did you mean 'bytes_per_token'?"),
        ({"own": PAPER["own"] | {"decod": 1}}, "own.decod: unknown key; did you mean 'decode'?"),
        ({"own": PAPER["own"] | {"decode": {"base_s": 1, "max_row": 1}}}, "own.decode.max_row: unknown key; "),
        ({"remote": {"prefill": {"point": []}}}, "remote.prefill.point: unknown key; did you mean 'points'?"),
        ({"remote": PAPER["remote"] | {"model": {"context": 1}}}, "remote.model.context: unknown key; "),
        ({"own": 3}, "own must be a JSON object, not 3"),
        ({"state": {"bytes_per_token": 0}}, "state: fixed_bytes and bytes_per_token are both 0"),
        (
            {"remote": {"prefill": {"constant_s": 0, "per_token_s": 0}}},
            "remote.prefill: constant_s, per_token_s and per_square_s must take 1e-12 seconds or more for a token, not",
        ),
        (
            {"own": PAPER["own"] | {"decode": {"base_s": 1e-300}}},
            "own.decode: base_s, per_row_s and per_context_s must take 1e-12 seconds or more for a token, not 1e-300",
        ),
        (
            {"own": PAPER["own"] | {"decode": {"base_s": 0.02, "per_row_s": 1e18}}},
            "own.decode.per_row_s must be a number >= 0 and <= 100, not 1e+18",
        ),
        ({"own": PAPER["own"] | {"model": {"digest": [1]}}}, "own.model.digest must be text, not [1]"),
        ({"num_own": 10**6}, "num_own must be a whole number >= 2 and <= 10000, not 1000000"),
        ({"num_remote": 10**9}, "num_remote must be a whole number >= 0 and <= 10000, not 1000000000"),
        (
            {"workload": PAPER["workload"] | {"high": 10**9}},
            "workload.high must be a whole number >= 128 and <= 2000000",
        ),
        ({"price_ratio": 1e300}, "price_ratio must be a number above 0 and <= 100, not 1e+300"),
        ({"arrivals": {"num_requests": 10**9}}, "arrivals.num_requests must be a whole number >= 100 and <= 1000000"),
        ({"arrivals": {"num_requests": 1e30}}, "arrivals.num_requests must be a whole number >= 100"),
        ({"arrivals": {"cv": 1e150}}, "arrivals.cv must be a number >= 0 and <= 100, not 1e+150"),
        ({"arrivals": {"load": 0}}, "arrivals.load must be a number >= 0.001 and <= 100, not 0"),
        ({"arrivals": {"period": "0s"}}, "arrivals.period must be >= 1 and <= 1000000000"),
        ({"remote": {"prefill": {"points": 4}}}, "remote.prefill.points must be a list of [tokens, seconds], not 4"),
        ({"remote": {"prefill": {"points": [[1, 2], [3]]}}}, "remote.prefill.points[1] must be [tokens, seconds]"),
        ({"arrivals": {"as_recorded": 1}}, "arrivals.as_recorded must be true or false, not 1"),
        ({"link": {"rate": "inf"}}, "link.rate must be above 0 and <= 1e+15, in seconds or bits per second, not 'inf'"),
        (
            {"workload": PAPER["workload"] | {"sigma": 1e-200}},
            "workload: no whole number from low = 128 to high = 128000 has any weight in a log-normal with mu = 9.9 and"
            " sigma = 1e-200",
        ),
        (
            {"workload": {"kind": "log-normal", "mu": 1, "sigma": 0.1, "low": 5000, "high": 9000}},
            "workload: no whole number from low = 5000 to high = 9000 has any weight in a log-normal with mu = 1 and",
        ),
        (
            {"workload": {"kind": "log-normal", "mu": 7, "sigma": 1, "low": 5000, "high": 4000}},
            "workload.high must be a whole number >= 5000",
        ),
    ],
)
def test_mistakes_are_named_in_full(capsys, tmp_path, change, message):
    file = tmp_path / "wrong.json"
    file.write_text(json.dumps(PAPER | change))
    assert main(["plan", str(file)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "change",
    [
        {"timestamp": float("nan")},
        {"timestamp": float("inf")},
        {"timestamp": -1},
        {"input_length": 0},
        {"input_length": -3},
        {"input_length": float("nan")},
        {"output_length": -1},
        {"timestamp": 10**400},
        {"input_length": 10**400},
        {"hash_ids": [float("inf")]},
        {"hash_ids": {"a": 1}},
        {"hash_ids": [1 << 70]},
    ],
)
def test_lines_of_a_trace_are_named(tmp_path, change):
    line = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1]}
    (tmp_path / "t.jsonl").write_text(json.dumps(line) + "\n" + json.dumps(line | change))
    with pytest.raises(ValueError, match=r"workload.path: .*t.jsonl: line 2 is not a request"):
        scenario(PAPER | {"workload": {"kind": "trace", "path": "t.jsonl"}}, tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"timestamp": ' + "[" * 100_000, "t.txt: line 1 is not a request of a Mooncake trace: RecursionError"),
        (f"TIMESTAMP,ContextTokens,GeneratedTokens\n{'9' * 200_000},1,1\n", "t.txt: .*field larger than field limit"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nd nan:00:00,1,1\n", "line 2 .* the instant must be .* not nan"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nd 00:00:00,x,1\n", "ContextTokens must be a whole number, not 'x'"),
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens\nd 00:00:00,1,1\n",
            "none of 200 prompts has a token left to compute",
        ),
    ],
)
def test_files_that_are_no_traces_are_named(tmp_path, text, message):
    (tmp_path / "t.txt").write_text(text)
    with pytest.raises(ValueError, match=f"workload.*{message}"):
        scenario(FULL | {"workload": {"kind": "trace", "path": "t.txt"}}, tmp_path)


def test_lengths_far_out_in_a_tail_are_drawn_as_the_closed_form_has_them():
    """A part of 1e-45 lies inside: redrawing would never end."""
    tail = {"kind": "log-normal", "mu": 5, "sigma": 0.3, "low": 10_000, "high": 20_000, "num_output": 10}
    question = scenario(FULL | {"workload": tail, "arrivals": {"num_requests": 20_000}})
    drawn = [s.num_prompt for s in question.shapes]
    assert min(drawn) >= 10_000 and max(drawn) <= 20_000
    assert sum(drawn) / len(drawn) == pytest.approx(question.lengths.mean, rel=1e-3)
    for part in (0.1, 0.5, 0.9):
        at = question.lengths.quantile(part)
        assert sum(n <= at for n in drawn) / len(drawn) == pytest.approx(part, abs=0.015)


def test_one_length_alone_is_a_log_normal_too():
    one = {"kind": "log-normal", "mu": 9, "sigma": 1, "low": 5000, "high": 5000}
    assert {s.num_prompt for s in scenario(FULL | {"workload": one}).shapes} == {5000}


def test_both_ways_of_drawing_have_the_same_distribution():
    """At the part inside from which lengths are redrawn; the mean of 100,000 is off by a tenth of a percent at most."""
    high = 20_000
    for sigma in (0.7, 0.8):  # 0.6 and 1.3 % inside
        bounds = {"mu": 5.0, "sigma": sigma, "low": 870, "high": high}
        drawn = [s.num_prompt for s in log_normal(100_000, np.random.default_rng(1), **bounds)]
        # Redrawn lengths are cut to whole tokens: half a token less in the mean.
        assert sum(drawn) / len(drawn) == pytest.approx(Lengths.log_normal(**bounds).mean, rel=5e-3)


def test_no_variation_is_equal_intervals():
    assert set(gaps(50, np.random.default_rng(1), cv=0.0)) == {1.0}
    assert gaps(50, np.random.default_rng(1), cv=1e-5).std() == pytest.approx(1e-5, rel=0.5)


@pytest.mark.parametrize("error", [ZeroDivisionError, OverflowError, RecursionError, TypeError])
def test_numbers_that_do_not_go_together_are_one_line(capsys, tmp_path, monkeypatch, error):
    def fail(*_, **__):
        raise error("so it is")

    monkeypatch.setattr("common.sim.plan.plan", fail)
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(PAPER))
    assert main(["plan", str(file)]) == 2
    told = capsys.readouterr().err
    assert told == f"decodectl plan: {file} cannot be planned with, {error.__name__}: so it is\n"


@pytest.mark.parametrize(("text", "message"), [("[" * 100_000, "is no JSON: "), ("[1]", "JSON object, not list")])
def test_a_file_that_is_no_scenario_is_named(capsys, tmp_path, text, message):
    file = tmp_path / "deep.json"
    file.write_text(text)
    assert main(["plan", str(file)]) == 2
    told = capsys.readouterr().err
    assert message in told and str(file) in told and "Traceback" not in told


def test_a_daemon_reads_its_profile_of_a_later_version():
    """Only files of people's are strict."""
    told = {"prefill": {"constant_s": 1, "per_token_s": 1, "new": 2}, "newer": 3}
    assert node_profile(told).prefill(1) == 2
    with pytest.raises(ValueError, match=r"own\.newer: unknown key"):
        node_profile(told, "own", is_strict=True)


def test_every_key_is_documented():
    text = (Path(__file__).parents[2] / "docs" / "policies.md").read_text().split("## Planning")[1]
    rows = {line.split("|")[1].strip().strip("`") for line in text.splitlines() if line.startswith("| `")}
    sections = {"": KEYS, "link.": LINK_KEYS, "arrivals.": ARRIVAL_KEYS, "slo.": SLO_KEYS}
    sections["link.changes[]."] = ("at",)
    wanted = {prefix + key for prefix, keys in sections.items() for key in keys}
    wanted |= {f"workload.{key}" for keys in WORKLOAD_KEYS.values() for key in keys}
    wanted |= {f"own.{key}" for key in NODE_KEYS[: NODE_KEYS.index("daemon")]}
    assert not wanted - rows


def test_help_says_where_the_keys_stand(capsys):
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    assert "docs/policies.md" in capsys.readouterr().out
