"""The simulator against what can be computed by hand: queues, shared links, closed-form decode, caches, traces."""

from __future__ import annotations

import itertools
import math
from copy import copy

import numpy as np
import pytest

from common.policy.costs import DecodeCost, StateSize
from common.policy.profile import NodeProfile, Polynomial
from common.policy.routing import Rules
from common.policy.threshold import ThresholdController
from common.policy.views import record, replayed
from common.sim.caches import BlockCache
from common.sim.cluster import Cluster
from common.sim.links import EvenLink, OrderedLink, tcp_bps
from common.sim.loop import Loop
from common.sim.nodes import DecodeNode, PrefillNode, Processor
from common.sim.report import Slo, goodput_rps
from common.sim.site import Deployment
from common.sim.traces import read_trace
from common.sim.workload import Shape, SimRequest, arrive, gaps, log_normal, retrieval, sessions

PREFILL = Polynomial(0.1, 1e-3)
OWN = NodeProfile("own", PREFILL, DecodeCost(0.02), 4)
FAST = NodeProfile("fast", Polynomial(0.05, 2e-4))


def site(**changed) -> Deployment:
    facts = {"num_remote": 1, "num_prefill": 1, "num_decode": 1, "egress_bps": 8e6, "rtt_s": 0.1}
    facts["state"] = StateSize(1000, 100)
    return Deployment(FAST, OWN, **(facts | changed))


def one(num_prompt: int, at: float = 0.0, number: int = 0, num_output: int = 10, blocks=()) -> SimRequest:
    return SimRequest(number, at, num_prompt, num_output, blocks)


def run(requests, mode="threshold", threshold=500.0, **changed):
    cluster = Cluster(site(**changed), Rules(mode, threshold, 2))
    return cluster, {r.number: r for r in cluster.run(requests)}


def test_lone_short_request_takes_what_its_node_takes():
    _, done = run([one(101)])
    assert done[0].place == "own"
    assert done[0].ttft_s == pytest.approx(PREFILL(100) + 0.02)
    assert done[0].done_at == pytest.approx(PREFILL(100) + 10 * 0.02)


def test_lone_long_request_waits_for_the_slower_of_compute_and_link():
    _, done = run([one(1001)])
    bytes_s = (1000 + 100 * 1000) * 8 / 8e6
    assert done[0].place == "remote"
    assert done[0].ttft_s == pytest.approx(max(0.05 + 0.2, bytes_s) + 0.1 + 0.02)
    _, done = run([one(1001)], egress_bps=8e9)
    assert done[0].ttft_s == pytest.approx(0.25 + 0.1 + 0.02)


def test_requests_wait_for_each_other_at_a_node():
    _, done = run([one(101, number=0), one(101, number=1)])
    assert done[1].ttft_s - done[0].ttft_s == pytest.approx(PREFILL(100))


def test_prediction_is_exact_where_the_router_knows_all():
    cluster, done = run([one(101 + n, at=0.05 * n, number=n) for n in range(20)], mode="adaptive")
    assert {r.place for r in done.values()} == {"own", "remote"}
    own = [r for r in done.values() if r.place == "own" and r.number < 3]
    assert all(r.predicted_ttft_s == pytest.approx(r.ttft_s, abs=0.021) for r in own)
    assert sum(cluster.beliefs.promised.values()) == pytest.approx(0.0, abs=1.0)


def sent(number, *, node="remote0", num_bytes=0.0, at=0.0, due_at=math.inf):
    request = one(101, number=number, at=at)
    request.node, request.left_bytes, request.due_at = node, num_bytes, due_at
    return request


def test_link_is_shared_evenly_and_follows_its_rate():
    loop, ends = Loop(), {}
    link = EvenLink(loop, 800.0, changes=[(2.0, 400.0)])
    for number, num_bytes in ((0, 100), (1, 200)):
        link.send(num_bytes, sent(number), lambda request: ends.setdefault(request.number, loop.now))
    loop.run()
    # 50 bytes/s each until 2 s, when the first is done; then 50 bytes/s for the other's 100 left.
    assert ends == {0: pytest.approx(2.0), 1: pytest.approx(4.0)}
    assert link.busy_s == pytest.approx(4.0)


def test_nodes_send_state_by_state_and_share_the_link():
    loop, ends = Loop(), {}
    link = OrderedLink(loop, 800.0, changes=[(3.0, 400.0)])
    for request in (sent(0, num_bytes=100), sent(1, num_bytes=200), sent(2, num_bytes=100, node="remote1")):
        link.send(request.left_bytes, request, lambda request: ends.setdefault(request.number, loop.now))
    loop.run()
    # Two nodes with 50 bytes/s each until 2 s, when the firsts are done; 100 bytes/s, and 50 from 3 s on.
    assert ends == {0: pytest.approx(2.0), 2: pytest.approx(2.0), 1: pytest.approx(5.0)}
    assert link.busy_s == pytest.approx(5.0) and link.num_bytes == 400


def test_a_node_sends_first_what_can_be_in_time():
    loop, ends = Loop(), {}
    link = OrderedLink(loop, 800.0)
    requests = [sent(0, num_bytes=900), sent(1, num_bytes=300, due_at=2.5), sent(2, num_bytes=100, at=1.0, due_at=3.0)]
    for request in requests:
        first, rest = request.left_bytes / 2, request.left_bytes / 2
        arguments = (
            first,
            request,
            lambda r, rest=rest: link.send(rest, r, lambda r: ends.setdefault(r.number, loop.now)),
        )
        loop.at(request.arrived_at, link.send, *arguments)
    loop.run()
    assert ends == {2: pytest.approx(2.0), 0: pytest.approx(10.0), 1: pytest.approx(13.0)}
    assert all(r.left_bytes == pytest.approx(0.0, abs=1e-6) for r in requests)


@pytest.mark.parametrize("kind", [EvenLink, OrderedLink])
def test_link_carries_all_bytes_whatever_comes_when(kind):
    rng = np.random.default_rng(3)
    loop, ends = Loop(), []
    link = kind(loop, 8000.0)
    sizes = rng.integers(1, 5000, 200)
    for n, (at, size) in enumerate(zip(np.sort(rng.uniform(0, 20, 200)), sizes, strict=True)):
        request = sent(n, node=f"remote{n % 3}", num_bytes=float(size), at=float(at), due_at=float(at + n % 7))
        loop.at(float(at), link.send, float(size), request, lambda _: ends.append(loop.now))
    loop.run()
    assert len(ends) == 200
    assert link.busy_s == pytest.approx(sizes.sum() / 1000)


@pytest.mark.parametrize("cost", [DecodeCost(0.02), DecodeCost(0.01, 0.002), DecodeCost(0.01, 0.001, 1e-5)])
def test_closed_form_decode_equals_step_by_step(cost):
    """Random joins; the reference advances one token at a time, and joins wait there for the end of a step."""
    rng = np.random.default_rng(5)
    joins = [(float(t), int(p), int(o)) for t, p, o in zip(
        np.sort(rng.uniform(0, 5, 12)), rng.integers(10, 3000, 12), rng.integers(20, 200, 12), strict=True
    )]  # fmt: skip
    loop, done = Loop(), {}
    node = DecodeNode(loop, cost, 20, lambda r: done.setdefault(r.number, r.done_at or loop.now))
    for n, (at, prompt, output) in enumerate(joins):
        loop.at(at, node.join, one(prompt, number=n, num_output=output))
    loop.run()
    expected = step_by_step(cost, joins)
    for n, when in expected.items():
        assert done[n] == pytest.approx(when, abs=4 * cost.step_s(12, 12 * 3200)), n


def step_by_step(cost, joins):
    now, rows, left, done = 0.0, {}, list(enumerate(joins)), {}
    while rows or left:
        while left and left[0][1][0] <= now:
            n, (_, prompt, output) = left.pop(0)
            rows[n] = [prompt, output]
        if not rows:
            now = left[0][1][0]
            continue
        now += cost.step_s(len(rows), sum(r[0] for r in rows.values()))
        for n in list(rows):
            rows[n] = [rows[n][0] + 1, rows[n][1] - 1]
            if not rows[n][1]:
                done[n] = now
                del rows[n]
    return done


def test_rows_that_find_no_room_wait():
    _, done = run([one(11, number=n, num_output=50) for n in range(6)], num_prefill=6)
    firsts = sorted(r.first_token_at for r in done.values())
    assert firsts[4] - firsts[3] > 0.9


def test_local_prefill_slows_running_rows():
    free = run([one(11, num_output=100)], does_local_prefill=True, num_remote=0, num_prefill=0)[1]
    two = [one(11, num_output=100), one(2001, at=0.2, number=1)]
    busy = run(two, does_local_prefill=True, num_remote=0, num_prefill=0)[1]
    assert busy[0].place == busy[1].place == "local"
    assert busy[0].done_at > free[0].done_at + 1.0
    assert busy[1].ttft_s > PREFILL(2000)


def test_only_what_is_lacking_is_computed_and_sent():
    blocks = (1, 2, 3)
    first, again = one(1537, blocks=blocks), one(1700, at=10.0, number=1, blocks=(*blocks, 4))
    cluster, done = run([first, again], cache_tokens=(1e6, 1e6))
    assert cluster.link.num_bytes == pytest.approx(1000 + 100 * 1536)  # the second had 1536 of 1699 tokens at home
    assert (done[1].place, done[1].num_computed) == ("own", 1699 - 1536)


def test_full_hit_skips_prefill():
    requests = [one(1025, blocks=(1, 2)), one(1025, at=10.0, number=1, blocks=(1, 2))]
    _, done = run(requests, cache_tokens=(1e6, 1e6))
    assert (done[1].place, done[1].ttft_s) == ("none", pytest.approx(0.02))


@pytest.mark.parametrize(("egress_bps", "is_pushed"), [(8e9, True), (4e5, False)])
def test_prefix_is_pushed_where_that_saves_time(egress_bps, is_pushed):
    """decoded holds four blocks that its own node computed; the remote node has nothing."""
    blocks = tuple(range(20))
    requests = [one(2100, blocks=blocks[:4]), one(10_300, at=20.0, number=1, blocks=blocks)]
    cluster, done = run(requests, threshold=5000.0, egress_bps=egress_bps, cache_tokens=(1e6, 1e6))
    assert (done[0].place, done[1].place) == ("own", "remote")
    assert cluster.uplink.num_bytes == (1000 + 100 * 2048 if is_pushed else 0)
    assert done[1].num_held == 2048


def test_cache_forgets_ends_before_beginnings():
    cache = BlockCache(3 * 512, 512)
    cache.add((1, 2, 3))
    cache.add((1, 9))
    assert cache.match((1, 2, 3)) == 1024
    assert cache.match((1, 9)) == 1024
    assert BlockCache(0, 512).match((1,)) == 0


def test_cache_keeps_what_was_used_more_often_as_the_daemons_do():
    cache = BlockCache(4 * 512, 512)
    for _ in range(4):
        cache.add((1, 2))
    cache.add((3, 4))
    cache.add((5, 6))
    assert [cache.match(blocks) for blocks in ((1, 2), (3, 4), (5, 6))] == [1024, 0, 1024]


def test_same_seed_same_run():
    def once():
        rng = np.random.default_rng(7)
        requests = arrive(log_normal(300, rng, mu=6.0, low=10, high=3000, num_output=20), 3.0, rng, cv=3)
        _, done = run(requests, mode="adaptive")
        return [(r.number, r.place, r.ttft_s) for r in done.values()]

    assert once() == once()


def test_recorded_decisions_replay():
    """What the simulator's router saw, written down as JSON would have it, is decided the same way again."""
    import json

    from common.policy.routing import decide

    seen = []
    cluster = Cluster(
        site(), Rules("adaptive", 500.0, 2), ttft_slo=lambda n: 2.0, on_decision=lambda *facts: seen.append(facts)
    )
    rng = np.random.default_rng(7)
    cluster.run(arrive(log_normal(200, rng, mu=6.0, low=10, high=3000, num_output=20), 4.0, rng))
    assert len({d.peer for *_, d in seen}) == 2
    for view, peers, local, decision in seen:
        facts = json.loads(json.dumps(record(view, peers, local)))
        assert decide(*replayed(facts), cluster.rules) == decision


def test_arrivals_have_rate_and_variation():
    rng = np.random.default_rng(1)
    for cv in (1.0, 3.0):
        drawn = gaps(200_000, rng, cv=cv)
        assert drawn.mean() == pytest.approx(1.0, abs=0.03)
        assert drawn.std() == pytest.approx(cv, rel=0.05)
    made = arrive([Shape(10, 1)] * 20_000, 10.0, rng, swing=0.8, period_s=400.0)
    phase = np.array([r.arrived_at for r in made if r.arrived_at < 1600.0]) % 400.0
    high, low = (phase < 200).sum(), (phase >= 200).sum()
    assert high / low == pytest.approx((1 + 1.6 / np.pi) / (1 - 1.6 / np.pi), rel=0.1)


def test_sessions_extend_their_prompts_and_wait_for_answers():
    rng = np.random.default_rng(2)
    shapes = sessions(64, rng)
    for shape in shapes:
        if shape.follows >= 0:
            before = shapes[shape.follows]
            assert shape.blocks[: len(before.blocks)] == before.blocks
            assert shape.num_prompt > before.num_prompt + before.num_output
    firsts = arrive(shapes, 1.0, rng)
    assert len(firsts) == 8
    cluster = Cluster(site(egress_bps=8e9, cache_tokens=(1e6, 1e6)), Rules("threshold", 4000.0, 2))
    done = {r.number: r for r in cluster.run(firsts)}
    assert len(done) == 64
    for n, shape in enumerate(shapes):
        if shape.follows >= 0:
            assert done[n].arrived_at >= done[shape.follows].done_at
            assert done[n].num_computed < shape.num_prompt - shapes[shape.follows].num_prompt + 512


def test_documents_are_shared_only_up_to_the_first_difference():
    shapes = retrieval(300, np.random.default_rng(3), num_documents=20)
    assert all(s.blocks[0] == shapes[0].blocks[0] for s in shapes)
    shared = [
        sum(1 for _ in itertools.takewhile(lambda p: p[0] == p[1], zip(a.blocks, b.blocks, strict=False)))
        for a, b in itertools.pairwise(shapes)
    ]
    assert min(shared) >= 1
    assert len(set(shapes[0].blocks)) == len(shapes[0].blocks)


def test_goodput_counts_what_met_both_bounds():
    requests = [one(10, at=float(n), number=n) for n in range(3)]
    for r, (first, done) in zip(requests, ((0.5, 0.9), (3.0, 3.4), (2.5, 9.0)), strict=True):
        r.first_token_at, r.done_at = first, done
    assert goodput_rps(requests, Slo(lambda n: 1.0, 0.05)) == pytest.approx(1 / 2)


def test_loss_bounds_tcp():
    assert tcp_bps(1e9, 0.03, 0.0) == 1e9
    assert tcp_bps(1e9, 0.03, 0.01, num_links=1) == pytest.approx(8 * 1448 / 0.03 * 150**0.5)


def test_traces_of_both_kinds(tmp_path):
    mooncake, azure = tmp_path / "m.jsonl", tmp_path / "a.csv"
    mooncake.write_text(
        '{"timestamp": 2000, "input_length": 1100, "output_length": 3, "hash_ids": [0, 1, 2]}\n'
        '{"timestamp": 500, "input_length": 30, "output_length": 0, "hash_ids": [7]}\n'
    )
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 23:59:59.5000000,100,10\n2023-11-17 00:00:01.0000000,200,20\n"
    )
    trace = read_trace(mooncake)
    assert trace.instants == (0.0, 1.5)
    assert trace.shapes == (Shape(30, 1, ()), Shape(1100, 3, (0, 1)))
    trace = read_trace(azure)
    assert trace.instants == pytest.approx((0.0, 1.5))
    assert [r.arrived_at for r in trace.requests(speed=2.0)] == pytest.approx([0.0, 0.75])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"timestamp": 0}\n', "line 1 is not a request of a Mooncake trace"),
        ("a,b\n1,2\n", "no column TIMESTAMP"),
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 1:2:3,0,1\n",
            "ContextTokens must be a whole number >= 1",
        ),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "no request in it"),
    ],
)
def test_broken_traces_are_named(tmp_path, text, message):
    (tmp_path / "t").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_trace(tmp_path / "t")


@pytest.mark.slow
def test_two_thousand_requests_a_second():
    """Of wall time, with the adaptive router; on a quiet core it is several times that."""
    import time

    rng = np.random.default_rng(1)
    requests = arrive(log_normal(4000, rng, mu=6.0, low=10, high=3000, num_output=20), 3.0, rng)
    started = time.process_time()
    run(requests, mode="adaptive")
    assert 4000 / (time.process_time() - started) > 2000


def cut_run(mode, controller=None):
    """A tenth of the link from 100 s to 200 s, under a steady load that the own node could just do alone."""
    cluster = Cluster(
        site(egress_bps=4e6, rate_changes=((100.0, 4e5), (200.0, 4e6)), num_decode=4),
        Rules(mode, 800.0, 2),
        controller=controller,
    )
    rng = np.random.default_rng(11)
    shapes = log_normal(300, rng, mu=6.4, sigma=0.8, low=20, high=6000, num_output=10)
    return cluster.run(arrive(shapes, 1.0, rng))


def part(requests, first, last):
    return [r for r in requests if first <= r.arrived_at < last]


def offloaded(requests):
    return sum(r.place == "remote" for r in requests) / len(requests)


def test_adaptive_leaves_a_link_that_is_cut_and_comes_back():
    done = cut_run("adaptive")
    before, cut, after = (offloaded(part(done, *span)) for span in ((0, 100), (110, 200), (210, 300)))
    assert cut < 0.8 * before
    assert after > cut
    local = cut_run("local-only")
    p95 = [np.percentile([r.ttft_s for r in part(runs, 100, 200)], 95) for runs in (done, local)]
    assert p95[0] <= p95[1]


def test_fast_loop_raises_the_threshold_while_the_link_is_cut():
    controller, seen = ThresholdController(800.0), []
    step = controller.step

    def watched(now, *facts):
        solved = step(now, *facts)
        seen.append((now, controller.threshold_tokens))
        return solved

    controller.step = watched
    cut_run("threshold", controller)
    assert {t for now, t in seen if now < 100} == {800.0}
    assert max(t for now, t in seen if 100 < now < 130) > 1200
    assert seen[-1][1] == 800.0


def prompts_at_one_node(max_sharing: int) -> dict[int, float]:
    """When each of a long prompt and two short ones, which come just after it, is computed; chunks take a second."""
    loop, ends = Loop(), {}
    node = PrefillNode(loop, "n", lambda tokens: tokens / 100, Processor(100), max_sharing)

    def chunk(request, _stop, ends_at, is_last):
        if is_last:
            ends[request.number] = ends_at

    for number, tokens in enumerate((600, 100, 100)):
        loop.at(0.1 * number, node.put, one(tokens + 1, number=number), 0, tokens, chunk)
    loop.run()
    assert node.num_queued_tokens == 0
    assert node.busy_s == pytest.approx(8.0)
    return ends


def test_prompts_take_turns_as_in_the_daemons_where_nodes_share():
    assert prompts_at_one_node(1) == pytest.approx({0: 6.0, 1: 7.0, 2: 8.0})
    # After its first chunk the oldest, then the shortest, then the longest waiting, then the shortest have their turn.
    assert prompts_at_one_node(16) == pytest.approx({1: 3.0, 2: 4.0, 0: 8.0})
    # With room for two the third waits until the second is done.
    assert prompts_at_one_node(2) == pytest.approx({1: 3.0, 2: 5.0, 0: 8.0})


def test_windows_cross_once_and_with_the_end():
    state = StateSize(1000, 100, window_bytes_per_token=50, window_tokens=200)
    assert state.num_bytes(1000) == 1000 + 100 * 1000 + 50 * 200
    assert state.num_bytes(150) == 1000 + 150 * 150
    assert state.num_bytes(1000, 900) == 1000 + 150 * 100
    assert state.num_bytes(1000, 1000) == 0
    cluster, done = run([one(1001)], state=state)
    assert cluster.link.num_bytes == state.num_bytes(1000)
    assert done[0].place == "remote"


def test_what_a_request_takes_besides_shows_on_its_way():
    _, plain = run([one(101), one(1001, number=1)])
    _, led = run([one(101), one(1001, number=1)], lead_s=(0.5, 0.25))
    assert led[0].ttft_s - plain[0].ttft_s == pytest.approx(0.5)
    assert led[1].ttft_s - plain[1].ttft_s == pytest.approx(0.25)


def test_a_newcomer_waits_for_the_end_of_a_chunk_that_has_a_step_of_its_own():
    facts = {"num_prefill": 0, "does_local_prefill": True, "chunk_tokens": 100, "egress_bps": 8e12, "rtt_s": 0.0}
    # Remote after 0.15 s, when decoded has computed half of a first chunk that takes 0.2 s.
    _, done = run([one(301), one(501, number=1)], mode="threshold", threshold=400.0, **facts)
    assert done[1].place == "remote"
    assert done[1].first_token_at >= 0.2
    # And what is computed beside its row takes as long as was measured.
    _, slow = run([one(301), one(501, number=1)], threshold=400.0, measured_slowdown=5.0, measured_stretch=2.7, **facts)
    assert slow[0].first_token_at > done[0].first_token_at


def beside_a_row(num_prompt: int = 2001, num_output: int = 400, **changed) -> tuple[SimRequest, SimRequest, float]:
    """A stream, and a prompt that comes while it runs; and seconds that the prompt takes alone."""
    facts = {"num_prefill": 0, "num_remote": 0, "does_local_prefill": True}
    _, done = run([one(11, num_output=num_output), one(num_prompt, at=0.5, number=1)], **(facts | changed))
    return done[0], done[1], PREFILL(num_prompt - 1)


def test_a_step_with_a_prompt_is_as_long_as_the_daemons_budget_makes_it():
    """Rows take 20 ms and a token 1 ms: of 0.9 x 3 x 20 ms 34 tokens are left, so 32 in 52 ms, but for quiet steps."""
    stream, late, alone_s = beside_a_row()
    assert late.ttft_s == pytest.approx(alone_s * 52 / 32, rel=0.05)
    # The stream gets on meanwhile by a token each 52 ms, and each 20 ms before and after.
    assert stream.done_at - stream.first_token_at == pytest.approx(399 * 0.02 + 32e-3 * alone_s / 32e-3, rel=0.05)


@pytest.mark.parametrize(("slowdown", "stretch"), [(2.4, 2.1), (1.6, 2.45)])
def test_what_was_measured_beside_streams_comes_out_again(slowdown, stretch):
    """By the steps' size: a token costs what the measurement says, and the budget decides how many there are."""
    stream, late, alone_s = beside_a_row(measured_slowdown=slowdown, measured_stretch=stretch)
    ratio = slowdown * (1 - 1 / stretch)
    size = max(n for n in (4, 8, 16, 24, 32, 48) if n * ratio * 1e-3 <= 1.7 * 0.02)
    step_s = 0.02 + size * ratio * 1e-3
    assert late.ttft_s == pytest.approx(alone_s * step_s / (size * 1e-3), rel=0.1)
    assert stream.done_at > late.first_token_at


def test_a_newcomers_first_token_comes_at_the_end_of_its_first_step():
    """Two prompts: the first decodes beside the second's chunks from its first token on."""
    facts = {"num_prefill": 0, "num_remote": 0, "does_local_prefill": True, "chunk_tokens": 200}
    _, done = run([one(201), one(2001, number=1)], **facts)
    # A step with rows of 20 ms and the budget's 32 tokens to begin with.
    assert done[0].first_token_at == pytest.approx(PREFILL(200) + 0.02 + 0.032 + 0.1, abs=0.001)
    # It was the last one: the step has no chunk.
    _, done = run([one(201)], **facts)
    assert done[0].first_token_at == pytest.approx(PREFILL(200) + 0.02)


IMPORTS = {"num_prefill": 0, "does_local_prefill": True, "chunk_tokens": 100, "egress_bps": 8e12, "rtt_s": 0.0}


def test_taking_in_state_keeps_decoded_from_everything_else():
    requests = [(301, 0), (501, 1)]
    cluster, free = run([one(n, number=k) for n, k in requests], threshold=400.0, **IMPORTS)
    per_byte = 0.1 / (500 * cluster.deployment.state.bytes_per_token + 1000)
    _, dear = run([one(n, number=k) for n, k in requests], threshold=400.0, import_s=per_byte, **IMPORTS)
    # A tenth of a second in all, in which neither the local prompt nor any token gets on.
    assert dear[0].first_token_at - free[0].first_token_at == pytest.approx(0.1, rel=0.2)


def lost_to_imports(has_local_prompt: bool) -> tuple[float, float]:
    """Seconds that a stream of 100 tokens loses by another prompt's import, which takes a fifth of the time."""
    requests = [one(301, number=0, num_output=100), one(20_001, at=0.6, number=1)]
    requests += [one(5001, at=0.6, number=2)] if has_local_prompt else []
    found = []
    for per_byte in (0.0, 0.2 * 2e-4 / 100):
        _, done = run(list(map(copy, requests)), threshold=6000.0, import_s=per_byte, **IMPORTS)
        assert [done[n].place for n in sorted(done)] == ["local", "remote", "local"][: len(done)]
        found.append(done[0].done_at - done[0].first_token_at)
    return found[0], found[1] - found[0]


def test_streams_lose_to_an_import_as_its_bytes_arrive():
    took_s, lost_s = lost_to_imports(has_local_prompt=False)
    # A fifth of the time goes, from 0.6 s on: never the whole of the import at once.
    assert lost_s == pytest.approx(0.25 * (took_s - 0.2), rel=0.05)


def test_what_an_import_takes_while_a_prompt_is_mixed_in_the_prompt_loses_too():
    """The budget sees longer steps and gives the prompt less, so that streams lose a smaller part than without it."""
    took_s, lost_s = lost_to_imports(has_local_prompt=True)
    assert 0.0 < lost_s < 0.2 * took_s
