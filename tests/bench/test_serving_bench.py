"""The comparison of routing policies: what it computes by itself, and a whole one with the fake engine."""

from __future__ import annotations

import itertools
import json
import statistics

import pytest

from benchmarks.serving import report
from benchmarks.serving.__main__ import ladder, main
from benchmarks.serving.client import Answer
from benchmarks.serving.load import Load, Texts, requests, solve
from benchmarks.serving.profile import Measured, _import_s, _state
from benchmarks.serving.quota import CpuQuota, hierarchy
from benchmarks.serving.simulate import simulate
from benchmarks.serving.site import VARIANTS
from common.policy.costs import DecodeCost, StateSize
from common.sim.report import Slo

LOAD = Load(6.0, 1.0, 64, 3000, 16, 3.0, 0.8, 60.0, 1)


def measured(**changed) -> Measured:
    facts = {
        "remote_points": [(63.0, 0.07), (3000.0, 3.0)],
        "own_points": [(63.0, 0.2), (3000.0, 9.0)],
        "decode": DecodeCost(0.03, 0.002),
        "slowdown": 2.0,
        "import_s": (0.0, 0.0),
        "stretch": 2.5,
        "state": StateSize(0.0, 46_080.0),
        "codec_ratio": 0.8,
        "remote_lead_s": 0.03,
        "own_lead_s": 0.01,
        "link_bps": 140e6,
        "rtt_s": 0.02,
        "max_rows": 16,
    }
    return Measured(**(facts | changed))


def answered(num_prompt: int, raw: int, arrived_at: float = 0.0, first_s: float = 1.0) -> Answer:
    answer = Answer(num_prompt, 3, arrived_at, "ok", [arrived_at + first_s + 0.1 * n for n in range(3)])
    answer.report = {"route": "remote", "raw_bytes": raw, "wire_bytes": raw // 2, "timing": {}}
    return answer


def test_requests_come_in_bursts_at_exactly_the_rate_that_was_asked_for():
    found = requests(LOAD, 4.0)
    assert len(found) == 240
    instants = [r.arrived_at for r in found]
    assert instants == sorted(instants)
    assert (len(found) - 1) / (instants[-1] - instants[0]) == pytest.approx(4.0)
    gaps = [b - a for a, b in itertools.pairwise(instants)]
    assert statistics.pstdev(gaps) > 2 * statistics.fmean(gaps)
    assert all(64 <= r.num_prompt <= 3000 for r in found)
    assert [r.num_prompt for r in requests(LOAD, 4.0)] == [r.num_prompt for r in found]


def test_the_ladder_spans_all_prompts():
    assert ladder(LOAD) == [64, 128, 256, 512, 1024, 2048, 3000]


def test_no_two_prompts_begin_alike():
    texts = Texts(range(1000))
    seen = [tuple(texts(300)[:8]) for _ in range(12)]
    assert len(set(seen)) == len(seen)


def test_state_of_windows_and_of_rows_is_told_apart():
    """Rows for ever at 10 bytes, a window of 512 tokens at 100 bytes each, 7 bytes whatever the length."""
    there = [answered(n + 1, 7 + 10 * n + 100 * min(n, 512)) for n in (63, 127, 1023, 2999)]
    state, ratio = _state(there)
    assert state.fixed_bytes == pytest.approx(7.0)
    assert state.bytes_per_token == pytest.approx(10.0)
    assert state.window_bytes_per_token == pytest.approx(100.0)
    assert state.window_tokens == pytest.approx(512.0)
    assert ratio == pytest.approx(0.5, rel=1e-3)


def test_what_taking_in_state_costs_is_a_mean_over_bytes():
    assert _import_s([(0.3, 20_000_000), (0.1, 20_000_000)]) == pytest.approx(1e-8)
    # By chance streams were early once; on the whole they cannot gain by it.
    assert _import_s([(0.3, 20_000_000), (-0.1, 20_000_000)]) == pytest.approx(5e-9)
    assert _import_s([(0.1, 20_000_000), (-0.3, 20_000_000)]) == 0.0


def test_the_simulator_takes_in_state_at_the_cost_of_the_way_it_comes():
    facts, asked = measured(import_s=(1e-9, 20e-9)), requests(LOAD, 1.5)
    near, far = (next(v for v in VARIANTS if v.name == name) for name in ("homogeneous", "remote-only"))
    free = {v.name: _tpot_s(simulate(measured(), v, 500.0, 5.0, asked)) for v in (near, far)}
    dear = {v.name: _tpot_s(simulate(facts, v, 500.0, 5.0, asked)) for v in (near, far)}
    assert 1.0 < dear[near.name] / free[near.name] < 1.1
    assert 1.2 < dear[far.name] / free[far.name] < 2.0


def _tpot_s(done) -> float:
    return statistics.fmean(r.tpot_s for r in done)


def test_the_solver_offloads_long_prompts_and_divides_decodeds_time():
    solved = solve(measured(), LOAD)
    assert 64 < solved.threshold_tokens < 3000
    assert 0 < solved.num_prefill < 1
    assert solved.num_prefill + solved.num_decode == pytest.approx(1.0)
    slower = solve(measured(link_bps=30e6), LOAD)
    assert slower.threshold_tokens > solved.threshold_tokens
    assert slower.throughput_rps < solved.throughput_rps


def test_variants_differ_in_the_simulator_by_route_and_link_alone():
    facts, asked = measured(), requests(LOAD, 1.5)
    threshold = solve(facts, LOAD).threshold_tokens
    done = {v.name: simulate(facts, v, threshold, 5.0, asked) for v in VARIANTS}
    assert {name: len(found) for name, found in done.items()} == {v.name: len(asked) for v in VARIANTS}
    assert {r.place for r in done["local-only"]} == {"local"}
    assert {r.place for r in done["remote-only"]} == {r.place for r in done["homogeneous"]} == {"remote"}
    assert all((r.place == "remote") == (r.num_prompt - 1 > threshold) for r in done["threshold"])
    mean = {name: statistics.fmean(r.ttft_s for r in found) for name, found in done.items()}
    assert mean["homogeneous"] < mean["remote-only"]
    assert mean["threshold"] < mean["local-only"]
    # The requests asked for are not touched: every variant gets them as they were.
    assert all(not r.place and not r.done_at for r in asked)


def test_figures_count_goodput_per_second_of_offering():
    done = [answered(100, 10, arrived_at=float(n), first_s=1.0 + n) for n in range(4)]
    slos = {"fixed": Slo(lambda _: 2.5, 0.2), "3x": Slo(lambda tokens: tokens / 100, 0.05)}
    found = report.figures(done, 10.0, slos)
    assert found["goodput_fixed_rps"] == pytest.approx(0.2)
    assert found["goodput_3x_rps"] == 0.0  # tokens come too slowly
    # First tokens after 1, 2, 3 and 4 s take 0.5 (their pace), 0.8, 1.2 and 1.6 of the SLO: the first two always, the
    # third from 1.2 on, which two of 21 steps from 0.8 to 1.25 are.
    assert found["goodput_around_rps"] == pytest.approx((1 + 1 + 2 / 21) / 10)
    assert found["edge"] == 0.0
    near = slos | {"fixed": Slo(lambda _: 2.05, 0.2)}
    assert report.figures(done, 10.0, near)["edge"] == 0.25
    assert found["ttft_mean_s"] == pytest.approx(2.5)
    assert found["throughput_rps"] == pytest.approx(4 / 7.2)
    assert found["offloaded"] == 1.0
    with pytest.raises(ValueError, match="not one request"):
        report.figures([], 10.0, slos)


def test_deviations_are_of_the_simulated_from_the_measured():
    real = dict.fromkeys(report.SHOWN, 2.0) | {"goodput_3x_rps": 0.0}
    parts = {"threshold": report.deviations(real, dict.fromkeys(report.SHOWN, 2.2))}
    assert parts["threshold"]["ttft_mean_s"] == pytest.approx(0.1)
    assert parts["threshold"]["goodput_3x_rps"] is None
    assert report.within(parts, 0.15) == (6, 6)
    assert report.within(parts, 0.05) == (0, 6)
    text = report.table(parts, are_parts=True)
    assert "| threshold | +10% | +10% | +10% | - |" in text


def test_quota_is_written_for_either_kind_of_hierarchy(tmp_path):
    v1, v2 = tmp_path / "v1", tmp_path / "v2"
    for root in (v1, v2):
        root.mkdir()
    (v1 / "cpu.shares").write_text("1024")
    (v2 / "cgroup.controllers").write_text("cpuset cpu memory")
    assert hierarchy((tmp_path / "none", v1)) == v1
    assert hierarchy((v2, v1)) == v2
    assert hierarchy((tmp_path / "none",)) is None
    old, new = CpuQuota("bench", v1), CpuQuota("bench", v2)
    old.hold(42, 0.4)
    new.hold(42, 0.4)
    [group] = v1.glob("bench-*")
    assert (group / "cpu.cfs_quota_us").read_text() == "4000"
    assert (group / "cpu.cfs_period_us").read_text() == "10000"
    assert (group / "cgroup.procs").read_text() == "42"
    [group] = v2.glob("bench-*")
    assert (group / "cpu.max").read_text() == "4000 10000"
    new.hold(42, None)
    assert (group / "cpu.max").read_text() == "max 10000"
    assert (v2 / "cgroup.subtree_control").read_text() == "+cpu"


def test_a_quick_comparison_answers_every_request(tmp_path, capsys):
    file = tmp_path / "out.json"
    arguments = ["--quick", "--seconds", "1", "--high", "600", "--variants", "remote-only", "threshold"]
    assert main([*arguments, "--json", str(file)]) == 0
    told = json.loads(file.read_text())["fake"]
    assert [run["variant"] for run in told["runs"]] == ["remote-only", "threshold"]
    assert all(run["outcomes"] == {"ok": told["num_requests"]} for run in told["runs"])
    own = dict(map(tuple, told["measured"]["own_tokens_per_s"]))
    assert own[599.0] == pytest.approx(3000, rel=0.2)
    assert told["real"]["remote-only"]["offloaded"] == 1.0
    assert 0 < told["real"]["threshold"]["offloaded"] < 1
    routes = {
        (a["num_prompt"] - 1 > told["solved"]["threshold_tokens"], a["route"]) for a in told["runs"][1]["answers"]
    }
    assert routes == {(True, "remote"), (False, "local")}
    assert "comparisons within 15 %" in capsys.readouterr().out
