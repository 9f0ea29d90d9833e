"""The scheduler on fabricated outputs: no torch, no clock, no thread."""

from __future__ import annotations

import itertools
import random

import pytest

from common.errors import RequestFailed
from common.request import PromptLogprobs, TokenLogprob, TokenOutput
from common.sched.executor import ChunkResult, Sampled
from common.sched.scheduler import ChoiceEnded
from common.sched.slots import IntegrityError


def tokens_of(events):
    return [item for _, item in events if isinstance(item, TokenOutput)]


def chunks(run):
    return [(b.chunk.seq.seq_id, b.chunk.start, b.chunk.stop) for b in run.batches if b.chunk]


@pytest.mark.parametrize("num_tokens", [1, 2, 9, 10, 11, 12, 21, 25])
def test_prompt_minus_one_in_chunks_then_rows(make_run, num_tokens):
    run = make_run()
    run.sequence(num_tokens)
    out = tokens_of(run.drain())
    spans = [(a, b) for _, a, b in chunks(run)]
    assert [t.num_output_tokens for t in out] == [1, 2, 3, 4]
    assert [t.finish_reason for t in out] == [None, None, None, "length"]
    assert sum(b - a for a, b in spans) == num_tokens - 1
    assert all(b - a <= 10 for a, b in spans)
    assert all(a == b for (_, a), (b, _) in itertools.pairwise(spans))
    assert len(run.scheduler.accounts) == 0


def test_job_computes_every_token_and_keeps_its_slot_until_cancelled(make_run):
    run = make_run()
    job = run.job(25)
    assert run.drain() == []
    assert chunks(run) == [(1, 0, 10), (1, 10, 20), (1, 20, 25)]
    assert not job.slot.is_free
    run.scheduler.cancel(job.owner)
    run.scheduler.cancel(job.owner)
    assert job.slot.is_free
    run.scheduler.check_integrity()


def test_budget_limits_chunks_only_beside_rows(make_run):
    run = make_run()
    run.sequence(1, max_tokens=3)
    run.job(30)
    run.drain()
    assert [b.chunk.stop - b.chunk.start for b in run.batches] == [4, 4, 4, 10, 8]
    assert [len(b.rows) for b in run.batches] == [1, 1, 1, 0, 0]


def test_short_prompt_waits_for_at_most_two_chunks_of_a_long_one(make_run):
    for head_start in range(1, 8):
        run = make_run()
        long = run.job(1000)
        for _ in range(head_start):
            run.step()
        short = run.job(5)
        before = len(run.batches)
        while short.num_computed_tokens < 5:
            run.step()
        assert len(run.batches) - before <= 2
        run.drain()
        assert long.num_computed_tokens == 1000


def test_long_prompt_is_not_starved_by_short_ones(make_run):
    run = make_run()
    long = run.job(100)
    for _ in range(40):
        run.job(5)
        run.step()
    assert long.num_computed_tokens == 100


def test_middle_prompt_gets_chunks_between_a_long_and_many_short_ones(make_run):
    run = make_run()
    long, middle = run.job(10_000), run.job(100)
    shorts, gap, gaps = [], 0, []
    while middle.num_remaining:
        shorts = [s for s in shorts if s.num_remaining]
        if len(shorts) < 14:  # as many as admission lets in
            shorts.append(run.job(5))
        before, gap = middle.num_computed_tokens, gap + 1
        run.step()
        if middle.num_computed_tokens > before:
            gaps.append(gap)
            gap = 0
    assert max(gaps) <= 4 * 16
    assert long.num_computed_tokens > 0


def test_priority_goes_first_without_starving_the_oldest(make_run):
    run = make_run()
    old, low, high = run.job(50), run.job(20), run.job(30, priority=1)
    run.drain()
    order = [s for s, _, _ in chunks(run)]
    assert order[0] == high.seq_id
    assert order.index(old.seq_id) <= 1
    assert order.index(low.seq_id) > order.index(high.seq_id)


def test_paused_job_gets_no_chunk(make_run):
    run = make_run()
    first, second = run.job(30), run.job(100)
    run.step()
    first.is_held = True
    for _ in range(5):
        run.step()
    assert first.num_computed_tokens <= 10
    assert run.scheduler.num_waiting == 1
    first.is_held = False
    run.scheduler.advance(first)
    run.drain()
    assert (first.num_computed_tokens, second.num_computed_tokens) == (30, 100)


def test_job_paused_in_its_last_chunk_is_done_when_resumed(make_run):
    run = make_run()
    job = run.job(5)
    batch = run.scheduler.schedule()
    job.is_held = True
    run.scheduler.update_chunk(batch.chunk, ChunkResult())
    assert run.step() is None
    job.is_held = False
    run.scheduler.advance(job)
    assert run.scheduler.num_prefilling == 0
    run.scheduler.check_integrity()


def test_imported_state_joins_without_a_chunk(make_run):
    run = make_run()
    seq = run.sequence(20, held=True)
    assert run.step() is None
    seq.num_computed_tokens, seq.is_held = 19, False
    assert run.scheduler.advance(seq) == []
    assert len(tokens_of(run.drain())) == 4
    assert chunks(run) == []


def test_choices_fork_after_the_prompt(make_run):
    run = make_run()
    run.token = lambda seq: Sampled(100 + seq.choice)
    leader = run.sequence(12, choices=3)
    siblings = list(leader.siblings)
    out = tokens_of(run.drain())
    assert [s.slot.copies for s in siblings] == [[11], [11]]
    for choice in range(3):
        assert [t.token_id for t in out if t.choice == choice] == [100 + choice] * 4
    assert sum(b - a for _, a, b in chunks(run)) == 11
    assert len(run.scheduler.accounts) == 0


@pytest.mark.parametrize("choice", [0, 1, 2])
def test_cancelling_a_choice_before_the_fork_leaves_the_others(make_run, choice):
    run = make_run()
    run.token = lambda seq: Sampled(100 + seq.seed)
    leader = run.sequence(30, choices=3)
    run.step()
    run.scheduler.cancel(leader.owner, choice)
    run.scheduler.check_integrity()
    assert len(run.scheduler.accounts) == 2
    out = tokens_of(run.drain())
    assert {t.choice for t in out} == {0, 1, 2} - {choice}
    assert all(t.token_id == 100 + t.choice for t in out)
    assert len(run.scheduler.accounts) == 0


def test_cancelling_every_choice_in_any_order_frees_everything(make_run):
    for seed in range(20):
        run = make_run()
        leader = run.sequence(30, choices=4)
        rnd = random.Random(seed)
        for choice in rnd.sample(range(4), 4):
            for _ in range(rnd.randrange(3)):
                run.step()
            run.scheduler.cancel(leader.owner, choice)
            run.scheduler.check_integrity()
        assert len(run.scheduler.accounts) == 0
        assert run.scheduler.schedule() is None


def test_max_batch_keeps_later_sequences_waiting(make_run):
    run = make_run(max_batch=2)
    for _ in range(5):
        run.sequence(1, max_tokens=2)
    out = tokens_of(run.drain())
    assert len(out) == 10
    assert [len(b.rows) for b in run.batches] == [2, 2, 2, 2, 1, 1]


@pytest.mark.parametrize(
    ("params", "token", "count", "reason"),
    [
        ({"max_tokens": 1}, 7, 1, "length"),
        ({"max_tokens": 5}, 2, 1, "stop"),
        ({"max_tokens": 5, "ignore_eos": True}, 2, 5, "length"),
        ({"max_tokens": 5, "stop_token_ids": (7,)}, 7, 1, "stop"),
        ({"max_tokens": 5, "stop_token_ids": (7,), "ignore_eos": True}, 7, 1, "stop"),
        ({"max_tokens": 1}, 2, 1, "stop"),
    ],
)
def test_finish_reasons(make_run, params, token, count, reason):
    run = make_run()
    run.token = lambda _seq: Sampled(token)
    run.sequence(3, **params)
    out = tokens_of(run.drain())
    assert len(out) == count
    assert out[-1].finish_reason == reason
    assert all(t.finish_reason is None for t in out[:-1])


def test_context_limit_ends_with_length(make_run):
    run = make_run(max_context=12)
    run.sequence(10, max_tokens=50)
    out = tokens_of(run.drain())
    assert [t.finish_reason for t in out] == [None, "length"]


def test_max_tokens_zero_ends_without_a_token(make_run):
    run = make_run()
    run.sequence(10, choices=2, max_tokens=0)
    events = run.drain()
    assert [item for _, item in events] == [ChoiceEnded(0), ChoiceEnded(1)]
    assert len(run.scheduler.accounts) == 0


def test_prompt_logprobs_come_once_and_use_small_chunks(make_run):
    run = make_run(max_logit_rows=3)
    seq = run.sequence(8, held=True)
    seq.prompt_logprobs, seq.is_held = 0, False
    run.scheduler.advance(seq)
    entries = []
    while seq.num_remaining:
        batch = run.scheduler.schedule()
        assert batch.chunk.has_logits
        assert batch.chunk.stop - batch.chunk.start <= 3
        made = tuple(TokenLogprob(p + 1, -1.0) for p in range(batch.chunk.start, batch.chunk.stop))
        entries += run.scheduler.update_chunk(batch.chunk, ChunkResult(made))
    [(_, found)] = entries
    assert isinstance(found, PromptLogprobs)
    assert found.logprobs[0] is None
    assert [e.token_id for e in found.logprobs[1:]] == list(range(1, 8))


def test_failed_row_ends_its_request_only(make_run):
    run = make_run()
    other = run.sequence(3, max_tokens=3)
    bad = run.sequence(3, choices=2, max_tokens=3)
    error = RequestFailed("no finite logits")
    run.token = lambda seq: Sampled(-1, None, error) if seq.owner is bad.owner else Sampled(7)
    events = run.drain()
    assert [(s.owner, i) for s, i in events if i is error] == [(bad.owner, error)]
    assert len([s for s, i in events if isinstance(i, TokenOutput) and s is other]) == 3
    assert len(run.scheduler.accounts) == 0


def test_integrity_check_notices_a_lost_slot(make_run):
    run = make_run()
    seq = run.job(5)
    seq.slot.free()
    with pytest.raises(IntegrityError):
        run.scheduler.check_integrity()


def test_booking_twice_or_releasing_twice_is_a_bug(make_run):
    run = make_run()
    job = run.job(5)
    with pytest.raises(IntegrityError):
        run.scheduler.accounts.reserve(job)
    run.scheduler.cancel(job.owner)
    with pytest.raises(IntegrityError):
        run.scheduler.accounts.release(job)


def test_random_walk_ends_with_every_request_served_exactly(make_run):
    for seed in range(30):
        rnd = random.Random(seed)
        run = make_run(
            chunk_tokens=rnd.choice([1, 3, 10]), token_budget=rnd.choice([1, 4]), max_batch=rnd.choice([1, 3])
        )
        wanted, seen, cancelled = {}, {}, set()
        for _ in range(60):
            action = rnd.random()
            if action < 0.3:
                choices, max_tokens = rnd.choice([1, 1, 3]), rnd.randrange(1, 6)
                seq = run.sequence(rnd.randrange(1, 40), choices=choices, max_tokens=max_tokens)
                wanted[seq.owner] = choices * max_tokens
            elif action < 0.35 and wanted:
                owner = rnd.choice(list(wanted))
                run.scheduler.cancel(owner)
                cancelled.add(owner)
            for s, item in run.step() or []:
                if isinstance(item, TokenOutput):
                    seen[s.owner] = seen.get(s.owner, 0) + 1
        for s, item in run.drain():
            if isinstance(item, TokenOutput):
                seen[s.owner] = seen.get(s.owner, 0) + 1
        assert {o: n for o, n in seen.items() if o not in cancelled} == {
            o: n for o, n in wanted.items() if o not in cancelled
        }
        assert len(run.scheduler.accounts) == 0


def test_higher_priority_takes_the_place_of_a_running_row_which_resumes(make_run):
    run = make_run(max_batch=2)
    first, second = run.sequence(3, max_tokens=6), run.sequence(3, max_tokens=6)
    while not second.has_run:
        run.step()
    urgent = run.sequence(3, max_tokens=2, priority=1)
    while urgent.seq_id in run.scheduler.accounts:
        run.step()
        run.scheduler.check_integrity()
        assert not first.is_parked
    assert run.scheduler.num_preemptions == 1
    assert second.slot.parked and second.num_output_tokens < 6
    run.drain()
    assert second.num_output_tokens == 6
    assert not second.slot.parked


def test_equal_priorities_do_not_preempt(make_run):
    run = make_run(max_batch=1)
    for _ in range(3):
        run.sequence(3)
    run.drain()
    assert run.scheduler.num_preemptions == 0


def test_sequence_that_cannot_come_back_fails_alone(make_run):
    run = make_run(max_batch=1)
    low = run.sequence(3, max_tokens=6)

    def no_memory():
        raise RequestFailed("no memory")

    low.slot.unpark = no_memory
    while low.num_output_tokens == 0:
        run.step()
    high = run.sequence(3, max_tokens=2, priority=1)
    run.drain()
    assert high.num_output_tokens == 2 and low.num_output_tokens < 6
    assert low.seq_id not in run.scheduler.accounts
    assert any(seq is low for batch in run.batches for seq, _ in batch.failed)


def test_a_fixed_budget_is_kept_whole_and_a_prompts_end_comes_in_prepared_sizes(make_run):
    run = make_run(chunk_tokens=64, token_budget=20)
    run.scheduler.takes_chunks = True
    run.sequence(1, max_tokens=40)
    run.step()
    run.sequence(1 + 20 + 13)
    run.drain()
    assert [stop - start for _, start, stop in chunks(run)] == [20, 8, 4, 1]
