"""`decodectl plan`: the shipped example, its promises, and clear errors."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from common.sim.plan import html, plan, quicker_from, simulated, solutions
from common.sim.scenario import PAPER, scenario
from decoded.ctl.__main__ import main

KEYS = {"throughput_rps", "threshold_tokens", "num_prefill", "num_decode", "ttft_mean_s", "ttft_p90_s", "egress_bps"}


@pytest.fixture(scope="module")
def answer():
    data = PAPER | {"arrivals": PAPER["arrivals"] | {"num_requests": 3000}}
    return plan(scenario(data))


def test_every_way_has_every_key(answer):
    for way in ("prfaas", "homogeneous", "naive"):
        assert set(answer["closed_form"][way]) >= KEYS
        assert set(answer["simulated"][way]) >= KEYS | {"ttft_p50_s", "ttft_p99_s", "goodput_rps"}


def test_simulated_saturation_is_the_closed_form(answer):
    for way in ("prfaas", "homogeneous", "naive"):
        assert abs(answer["saturation"][way]["difference"]) < 0.05, way


def test_waiting_shows_in_simulated_times(answer):
    """The closed form's times are bare prefill."""
    for way in ("prfaas", "homogeneous", "naive"):
        assert answer["simulated"][way]["ttft_mean_s"] > 1.1 * answer["closed_form"][way]["ttft_mean_s"]


def test_the_answer_is_json(answer):
    assert not {"Infinity", "NaN"} & set(json.dumps(answer).split())
    json.dumps(answer, allow_nan=False)


def test_equal_cost_gain_is_the_papers(answer):
    """One H200 as dear as two H20: about +15 % in the paper."""
    assert answer["advice"]["equal_cost_nodes"] == 16
    assert answer["advice"]["pays"]
    assert answer["advice"]["gain_at_equal_cost"] == pytest.approx(0.15, abs=0.04)


def test_a_thin_link_does_not_pay():
    data = PAPER | {"link": {"rate": "10Mbit/s", "rtt": "10ms"}}
    question = scenario(data)
    told = plan(question, simulates=False)["advice"]
    assert not told["pays"]
    assert told["why_not"]
    assert quicker_from(question) is None


def test_page_stands_alone(answer):
    text = html(scenario(PAPER), answer)
    assert text.count("<svg") == 3
    assert "<script" not in text
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")


def test_example_runs_without_a_daemon(capsys, tmp_path):
    page = tmp_path / "plan.html"
    assert main(["plan", "--example", "paper", "--no-simulation", "--json", "--html", str(page)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["closed_form"]["prfaas"]["num_prefill"] == 3
    assert "<svg" in page.read_text()


def test_printed_example_is_a_scenario(capsys, tmp_path):
    assert main(["plan", "--example", "paper", "--print-scenario"]) == 0
    file = tmp_path / "mine.json"
    file.write_text(capsys.readouterr().out)
    assert main(["plan", str(file), "--no-simulation"]) == 0
    assert "3/5" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_own": 1}, "plan.num_own must be a whole number >= 2"),
        ({"link": {"rate": "fast"}}, "link.rate: 'fast' is not a rate"),
        ({"link": {"rate": "1Gbit/s", "loss": 1}}, "link.loss must be below 1, not 1"),
        ({"link": {"rate": "1Gbit/s", "changes": [{"rate": "1Mbit/s"}]}}, "link.changes[0].at"),
        ({"link": {"rate": "1Gbit/s", "changes": [{"at": "1s", "rate": "x"}]}}, "link.changes[0].rate: 'x' is not"),
        ({"link": {"rate": "1Gbit/s", "changes": [{"at": "2s"}, {"at": "1s"}]}}, "link.changes must be in the order"),
        ({"link": {"rate": "1Gbit/s", "changes": {"at": "2s"}}}, "link.changes must be a list of objects"),
        ({"remote": {"name": "x"}}, "profile 'x': prefill must be a table"),
        ({"own": {"name": "y", "prefill": {"constant_s": 1, "per_token_s": 1}}}, "own.decode is missing"),
        ({"workload": {"kind": "dreams"}}, "workload.kind must be"),
        ({"arrivals": {"swing": 1.5}}, "arrivals.swing must be below 1"),
        ({"arrivals": {"as_recorded": True}}, "arrivals.as_recorded needs"),
        ({"arrivals": {"period": "long"}}, "arrivals.period: 'long' is not a duration"),
        ({"remote": {"name": "x", "prefill": {"points": [[1, 2]]}}}, "prefill.points: a curve needs two points"),
    ],
)
def test_wrong_scenarios_are_named(capsys, tmp_path, change, message):
    file = tmp_path / "wrong.json"
    file.write_text(json.dumps(PAPER | change))
    assert main(["plan", str(file)]) == 2
    assert message in capsys.readouterr().err


def test_trace_is_read_beside_its_scenario(tmp_path):
    lines = [
        {"timestamp": n * 1000, "input_length": 600 + n, "output_length": 5, "hash_ids": [0, n + 1]} for n in range(120)
    ]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, lines)))
    data = PAPER | {"workload": {"kind": "trace", "path": "t.jsonl"}, "cache_tokens": 100_000}
    question = scenario(data | {"arrivals": {"num_requests": 120}}, tmp_path)
    # All but the first find the shared first block.
    assert question.lengths.mean == pytest.approx((599 + sum(599 + n - 512 for n in range(1, 120))) / 120)
    recorded = scenario(data | {"arrivals": {"num_requests": 120, "as_recorded": True}}, tmp_path)
    assert recorded.instants == tuple(float(n) for n in range(120))
    assert not math.isnan(plan(question, simulates=False)["closed_form"]["prfaas"]["throughput_rps"])


def test_a_link_loses_and_changes():
    link = {"rate": "100Gbit/s", "rtt": "10ms", "loss": 1e-4, "data_links": 8}
    question = scenario(PAPER | {"link": link | {"changes": [{"at": "60s", "loss": 1e-2}, {"at": "90s"}]}})
    # 8 connections, each MSS / RTT times the root of 1.5 / loss.
    assert question.egress_bps == pytest.approx(8 * 8 * 1448 / 0.01 * (1.5 / 1e-4) ** 0.5)
    assert question.rate_changes == ((60.0, pytest.approx(question.egress_bps / 10)), (90.0, question.egress_bps))
    wide, narrow = (
        simulated(scenario(PAPER | {"arrivals": {"num_requests": 500, "load": 0.5}} | more), solved, "threshold")
        for solved in [solutions(scenario(PAPER), is_exact=True)["prfaas"]]
        for more in ({}, {"link": PAPER["link"] | {"changes": [{"at": "20s", "rate": "2Gbit/s"}]}})
    )
    assert narrow["ttft_p90_s"] > 2 * wide["ttft_p90_s"]


def test_without_a_remote_site_there_is_nothing_to_pay_for():
    told = plan(scenario(PAPER | {"num_remote": 0}), simulates=False)
    assert "naive" not in told["closed_form"]
    assert told["closed_form"]["prfaas"]["offloaded"] == 0.0
    assert told["advice"]["why_not"] == "nothing would be offloaded"
    assert told["advice"]["quicker_remote_from_tokens"] is None


def test_plans_replay_a_trace_at_the_asked_rate(tmp_path):
    lines = [
        {"timestamp": 1000 * n, "input_length": 2000 + 30 * (n * 37 % 900), "output_length": 5, "hash_ids": []}
        for n in range(900)
    ]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, lines)))
    change = {"workload": {"kind": "trace", "path": "t.jsonl"}, "arrivals": {"as_recorded": True, "num_requests": 900}}
    question = scenario(PAPER | change, tmp_path)
    solved = solutions(question, is_exact=True)["prfaas"]
    told = simulated(question, solved, "threshold")
    # Evenly spaced at 0.8 of what can be served: answered at about the rate at which they come.
    assert told["throughput_rps"] == pytest.approx(0.8 * solved.throughput_rps, rel=0.05)


def measured(name: str, model: str = "d", **changes):
    """As `profile --out` writes it."""
    return {
        "name": name,
        "model": {"name": "m", "digest": model},
        "state": {"fixed_bytes": 1000, "bytes_per_token": 50},
        "prefill": {"points": [[64, 0.1], [1024, 1.0]], "constant_s": 0.05, "per_token_s": 9e-4, "per_square_s": 1e-8},
        "decode": {"base_s": 0.02, "per_row_s": 1e-3, "per_context_s": 1e-7, "max_rows": 8},
        "measured": {"prefill": []},
        **changes,
    }


def with_files(folder, own, remote):
    for name, data in (("own", own), ("remote", remote)):
        (folder / f"{name}.json").write_text(data if isinstance(data, str) else json.dumps(data))
    data = {key: value for key, value in PAPER.items() if key != "state"}
    return data | {"own": "own.json", "remote": "remote.json"}


def test_profiles_may_be_named_by_their_files(tmp_path, capsys):
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(with_files(tmp_path, measured("here"), measured("there", decode=None))))
    question = scenario(json.loads(file.read_text()), tmp_path)
    assert (question.own.name, question.remote.name) == ("here", "there")
    assert (question.state.fixed_bytes, question.state.bytes_per_token) == (1000, 50)
    assert question.own.prefill(1024) == pytest.approx(1.0)
    # Behind the points the cost goes on, with its square.
    grown = question.own.cost().seconds(0, 64_000) - question.own.cost().seconds(0, 1024)
    assert question.own.prefill(64_000) == pytest.approx(1.0 + grown, rel=0.02)
    assert main(["plan", str(file), "--no-simulation", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["closed_form"]["prfaas"]["throughput_rps"] > 0


def test_the_documented_scenario_is_one(tmp_path):
    text = (Path(__file__).parents[2] / "docs" / "policies.md").read_text()
    (block,) = [part for part in text.split("```json\n")[1:] if part.startswith('{"own": "own.json"')]
    with_files(tmp_path, measured("here"), measured("there", decode=None))
    assert scenario(json.loads(block.split("```")[0]), tmp_path).num_own == 2


def test_state_that_is_told_counts_before_the_profiles(tmp_path):
    data = with_files(tmp_path, measured("here"), measured("there")) | {"state": {"bytes_per_token": 7}}
    assert scenario(data, tmp_path).state.bytes_per_token == 7


@pytest.mark.parametrize(
    ("own", "remote", "why"),
    [
        (
            measured("here"),
            measured("there", model="e"),
            "own and remote are profiles of different models, 'm' and 'm'",
        ),
        (measured("here", decode=None), measured("there"), "own.decode is missing"),
        ("{", measured("there"), "own.json is no profile: "),
        ("[1]", measured("there"), "own.json is no profile: it holds no JSON object but list"),
        (measured("here"), "[" * 100_000, "remote.json is no profile: "),
        (measured("here", state={}), measured("there"), "state.bytes_per_token must be a number"),
    ],
)
def test_files_that_do_not_fit_are_named(tmp_path, own, remote, why):
    with pytest.raises(ValueError) as e:
        scenario(with_files(tmp_path, own, remote), tmp_path)
    assert why in str(e.value)


def test_a_file_that_is_not_there_is_named(tmp_path, capsys):
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(PAPER | {"own": "nothing.json"}))
    assert main(["plan", str(file)]) == 2
    assert "nothing.json" in capsys.readouterr().err
