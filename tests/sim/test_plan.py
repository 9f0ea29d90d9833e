"""`decodectl plan`: the shipped example, its promises, and clear errors."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from common.sim.plan import html, plan, quicker_from, solutions
from common.sim.runs import simulated
from common.sim.scenario import PAPER, scenario
from common.sim.tables import tables, three
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
        ({"num_own": 1}, "num_own must be a whole number >= 2 and <= 10000, not 1"),
        ({"link": {"rate": "fast"}}, "link.rate: 'fast' is not a rate"),
        ({"link": {"rate": "1Gbit/s", "loss": 1}}, "link.loss must be a number >= 0 and below 1, not 1"),
        ({"link": {"rate": "1Gbit/s", "changes": [{"rate": "1Mbit/s"}]}}, "link.changes[0].at"),
        ({"link": {"rate": "1Gbit/s", "changes": [{"at": "1s", "rate": "x"}]}}, "link.changes[0].rate: 'x' is not"),
        ({"link": {"rate": "1Gbit/s", "changes": [{"at": "2s"}, {"at": "1s"}]}}, "link.changes must be in the order"),
        ({"link": {"rate": "1Gbit/s", "changes": {"at": "2s"}}}, "link.changes must be a list of objects"),
        ({"remote": {"name": "x"}}, "remote.prefill is missing"),
        ({"own": {"name": "y", "prefill": {"constant_s": 1, "per_token_s": 1}}}, "own.decode is missing"),
        ({"workload": {"kind": "dreams"}}, "workload.kind must be"),
        ({"arrivals": {"swing": 1.5}}, "arrivals.swing must be a number >= 0 and below 1, not 1.5"),
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


BUSY = {"base_s": 0.012, "per_row_s": 1e-3, "per_context_s": 3e-6, "max_rows": 16}


def bound_by_decode(folder, **changes):
    """Nodes whose decode steps take twice as long with their context."""
    data = with_files(folder, measured("here", decode=BUSY), measured("there", decode=None))
    workload = {"kind": "log-normal", "mu": 6.5, "sigma": 1, "low": 32, "high": 9000, "num_output": 512}
    return (
        data
        | {
            "num_remote": 3,
            "num_own": 4,
            "num_homogeneous": 2,
            "workload": workload,
            "arrivals": {"num_requests": 2500},
        }
        | changes
    )


def test_the_closed_form_counts_the_context_of_a_full_batch(tmp_path):
    question = scenario(bound_by_decode(tmp_path), tmp_path)
    prompt = sum(s.num_prompt for s in question.shapes) / len(question.shapes)
    assert question.mean_context == pytest.approx(prompt + 512 / 2)
    told = plan(question)
    step_s = 0.012 + 1e-3 * 16 + 3e-6 * 16 * question.mean_context
    for way in ("prfaas", "homogeneous", "naive"):
        closed, most = told["closed_form_mean"][way], told["saturation"][way]
        assert closed["theta_rps"][2] == pytest.approx(closed["num_decode"] * 16 / step_s / 512)
        assert abs(most["difference"]) < 0.05, way
        assert most["probable_cause"] is None
        assert closed["bottleneck"] == most["bottleneck"] == "decode", way
        # What is offered can be served.
        assert told["simulated"][way]["ttft_mean_s"] < 10


def test_rows_that_stay_longer_count_for_more_of_the_context(tmp_path):
    lines = [
        {"timestamp": n, "input_length": 100, "output_length": 10}
        if n % 2
        else {"timestamp": n, "input_length": 1000, "output_length": 90}
        for n in range(100)
    ]
    (tmp_path / "t.jsonl").write_text("\n".join(json.dumps(line | {"hash_ids": []}) for line in lines))
    change = {"workload": {"kind": "trace", "path": "t.jsonl"}, "arrivals": {"num_requests": 100}}
    question = scenario(PAPER | change, tmp_path)
    assert question.mean_context == pytest.approx(0.1 * (100 + 5) + 0.9 * (1000 + 45))


def test_saturation_far_from_the_closed_form_is_explained(tmp_path, capsys):
    """Turns of a session come before the answers they continue are cached."""
    file = tmp_path / "plan.json"
    sessions = {"workload": {"kind": "sessions", "num_output": 64}, "cache_tokens": 1e6}
    file.write_text(json.dumps(bound_by_decode(tmp_path, **sessions)))
    assert main(["plan", str(file)]) == 0
    out = capsys.readouterr().out
    (line,) = [line for line in out.splitlines() if line.startswith("saturation, homogeneous")]
    assert "probable cause: prompts had" in line
    assert "turns of a session do not wait for answers" in line
    assert "warning: homogeneous: " in out


def test_a_link_that_changes_is_named_as_the_cause(tmp_path):
    link = {"rate": "1Gbit/s", "changes": [{"at": "20s", "rate": "100kbit/s"}]}
    told = plan(scenario(bound_by_decode(tmp_path, link=link), tmp_path))["saturation"]
    assert told["naive"]["difference"] < -0.5
    assert told["naive"]["probable_cause"] == "the closed form leaves out link.changes"
    assert told["homogeneous"]["probable_cause"] is None


def test_prompts_beyond_the_context_are_told(tmp_path, capsys):
    model = {"name": "m", "digest": "d", "max_context": 4096}
    own, remote = (measured(name, decode=BUSY) | {"model": model} for name in ("here", "there"))
    data = bound_by_decode(tmp_path) | with_files(tmp_path, own, remote)
    data["workload"] = {"kind": "log-normal", "mu": 7, "sigma": 1, "low": 32, "high": 9000, "num_output": 64}
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(data))
    question = scenario(data, tmp_path)
    beyond = sum(s.num_prompt > 4096 for s in question.shapes)
    assert 0 < beyond < len(question.shapes) / 2
    assert main(["plan", str(file), "--no-simulation"]) == 0
    assert f"warning: {beyond} of 6000 prompts" in (out := capsys.readouterr().out)
    assert "are longer than the 4096 tokens" in out
    assert "extrapolated" in out


def test_what_holds_at_saturation_and_at_the_load_stands_apart(answer):
    most, bare, load = tables(answer)
    assert "At saturation" in most[0]
    assert "offered load" in load[0]
    row = dict(zip(load[1], next(r for r in load[2] if r[0] == "simulated, naive"), strict=True))
    told = answer["simulated"]["naive"]
    assert float(row["offered req/s"]) == pytest.approx(told["offered_rps"], rel=0.006)
    assert float(row["offered req/s"]) < 0.9 * told["throughput_rps"]
    assert "req/s" not in row
    row = dict(zip(most[1], next(r for r in most[2] if r[0] == "simulated, naive"), strict=True))
    assert float(row["req/s"]) == pytest.approx(told["throughput_rps"], rel=0.006)
    assert not [r for r in bare[2] if r[0].startswith("simulated")]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.012345, "0.0123"), (0.3, "0.300"), (2.5, "2.50"), (99.44, "99.4"), (1234.4, "1234")],
)
def test_small_plants_have_three_digits(value, text):
    assert three(value) == text


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
        (measured("here", state={}), measured("there"), "own.state.bytes_per_token is missing"),
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
