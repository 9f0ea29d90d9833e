"""Repeated decode steps: the same bits as the model's own code, over joins and leaves, for every layer kind."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from common.engine.fixed import FixedBatch, FixedLayout
from common.engine.kernel_norm import accelerate_norms
from common.engine.kernels import accelerate
from common.engine.program import Arena, NotReplayable, Program, _arrange
from common.engine.replay import warm_up_sizes
from common.engine.runner import Runner, RunnerOptions
from common.engine.state import SlotState
from common.engine.tape import Tape
from common.errors import RequestFailed
from common.layout import StateLayout, StateSpec, TensorSpec
from common.request import SamplingParams
from common.sched import sequence as seq
from common.sched.budget import ALL_JOINT_SIZES
from tests.engine.families import FAMILIES


def recorded(run: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> tuple[Tape, torch.Tensor]:
    with torch.inference_mode(), Tape(inputs) as tape:
        out = run(*inputs)
    return tape, out


def program(run: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> Program:
    with torch.inference_mode():
        return Program(*recorded(run, *inputs), Arena())


@torch.inference_mode()
def check(run: Callable[..., torch.Tensor], make: Callable[[], tuple[torch.Tensor, ...]]) -> Program:
    made = program(run, *make())
    for _ in range(3):
        inputs = make()
        assert torch.equal(made.run(*inputs), run(*inputs))
    return made


def test_values_follow_the_inputs() -> None:
    weight = torch.randn(6, 4)

    def run(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        a = x @ weight
        b = torch.cat([a[:, :2], a[:, 2:].neg()], dim=-1)
        c = b.view(3, 2, 2).transpose(1, 2).reshape(3, 4) * y[:, None]
        c += torch.nn.functional.silu(a)
        return c.softmax(dim=-1).to(torch.float64).topk(2).values

    check(run, lambda: (torch.randn(3, 6), torch.randn(3)))


def test_what_depends_on_weights_alone_is_computed_once() -> None:
    weight = torch.randn(5)
    made = check(lambda x: x * (1.0 + weight.exp()) + torch.arange(5), lambda: (torch.randn(2, 5),))
    assert len(made) == 2


def test_states_that_were_there_before_change_each_time() -> None:
    state = torch.zeros(2, 3)

    def run(x: torch.Tensor) -> torch.Tensor:
        state.copy_(torch.roll(state, 1, dims=-1))
        state[:, 0] = x
        return state * 2

    made = program(run, torch.ones(2))
    state.zero_()
    with torch.inference_mode():
        made.run(torch.tensor([1.0, 2.0]))
        found = made.run(torch.tensor([3.0, 4.0]))
    assert found.tolist() == [[6.0, 2.0, 0.0], [8.0, 4.0, 0.0]]


def test_memory_is_used_again() -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        for _ in range(50):
            x = x.sin() + x.cos()
        return x

    made = check(run, lambda: (torch.randn(1000),))
    assert made.num_bytes <= 4 * 4096


def test_places_of_the_living_do_not_overlap() -> None:
    life = {n: [n, n + (n * 7) % 11] for n in range(60)}
    sizes = {n: 1 + (n * 37) % 300 for n in life}
    offsets, total = _arrange(life, sizes)
    for a in life:
        assert offsets[a] % 64 == 0
        assert offsets[a] + sizes[a] <= total
        for b in life:
            if a < b <= life[a][1]:
                assert offsets[a] + sizes[a] <= offsets[b] or offsets[b] + sizes[b] <= offsets[a]


@pytest.mark.parametrize(
    "run",
    [
        lambda x: x * x.max().item(),
        lambda x: x[x > 0],
        lambda x: x if bool(x.sum() > 0) else -x,
        lambda x: x + torch.rand(4),
        lambda x: x + torch.tensor(x.tolist()),
        lambda x: x[x.nonzero()[:, 0]],
        lambda x: x[torch.where(x > 1)[0]],
        lambda x: x.repeat_interleave(x.long()),
        lambda x: torch.nn.functional.dropout(x, 0.5, training=True),
    ],
    ids=["item", "mask", "bool", "random", "tolist", "nonzero", "where", "repeat_interleave", "dropout"],
)
def test_what_depends_on_values_is_refused(run) -> None:
    tape, out = recorded(run, torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert "depends on values" in tape.reason
    with pytest.raises(NotReplayable):
        Program(tape, out, Arena())


def test_what_runs_when_it_is_built_gets_real_values() -> None:
    table = torch.randn(5, 3)

    def run(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(table.index_select(0, index + 1) * x, 0.5, training=False)

    check(run, lambda: (torch.randn(2, 1), torch.randint(0, 4, (2,))))


@pytest.mark.parametrize("run", [lambda x: (x * 2).t_(), lambda x: (x * 2).unsqueeze_(0)], ids=["t_", "unsqueeze_"])
def test_a_tensor_that_changes_its_shape_is_refused(run) -> None:
    tape, _ = recorded(run, torch.ones(2, 3))
    assert "changes a tensor's shape in place" in tape.reason


def test_code_that_does_something_else_each_time_is_noticed() -> None:
    calls: list[int] = []

    def counts(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x * len(calls)

    def makes(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x * torch.tensor([float(len(calls)), 1.0])

    for run in (counts, makes):
        first, second = (recorded(run, torch.ones(2))[0] for _ in range(2))
        assert first.summary().difference(second)
    constant = torch.tensor([2.0, 1.0])

    def same(x: torch.Tensor) -> torch.Tensor:
        return x * torch.tensor([2.0, 1.0]) + constant

    first, second = (recorded(same, torch.ones(2))[0] for _ in range(2))
    assert first.summary().difference(second) == ""


class Row:
    """As the batch sees a slot."""

    def __init__(self, value: int) -> None:
        self.fixed = torch.full((64,), value, dtype=torch.uint8)


def test_a_batch_stays_where_it_is_and_rows_come_and_go() -> None:
    state = StateSpec(0, "recurrent", (TensorSpec("recurrent0", (4, 4), "float32"),))
    batch = FixedBatch(FixedLayout(StateLayout((state,))))
    rows = [Row(i) for i in range(6)]
    batch.gather(rows[:4])
    address = batch.gather(rows[:4]).rows.data_ptr()
    for wanted in ([0, 1, 2, 3], [0, 2, 3], [2, 0], [0], [4, 1, 0, 5], [3, 2, 1], [1, 2, 3, 4]):
        for _ in range(2):
            found = batch.gather([rows[i] for i in wanted])
            assert found.rows.data_ptr() == address
            assert found.rows[:, 0].tolist() == wanted
            found.rows.add_(10)  # changes the states of exactly these
            assert [int(rows[i].fixed[5]) for i in range(6)] == [i + 10 * (i in wanted) for i in range(6)]
            found.rows.sub_(10)
        assert batch.gather([rows[i] for i in wanted]) is found
    assert batch.gather(rows).rows[:, 0].tolist() == [0, 1, 2, 3, 4, 5]
    rows[2].fixed = torch.empty(0, dtype=torch.uint8)  # freed
    assert batch.gather([rows[0], rows[5]]).rows[:, 0].tolist() == [0, 5]
    batch.clear()
    assert [int(rows[i].fixed[0]) for i in (0, 1, 3, 4, 5)] == [0, 1, 3, 4, 5]


@pytest.mark.parametrize("then", [[2, 0, 1], [1, 2, 0], [2, 1, 0], [0, 2, 1]], ids=str)
def test_rows_change_places_right_after_the_batch_grew(then) -> None:
    state = StateSpec(0, "recurrent", (TensorSpec("recurrent0", (4, 4), "float32"),))
    batch = FixedBatch(FixedLayout(StateLayout((state,))))
    rows = [Row(i) for i in range(6)]
    for wanted in ([0], [0, 1], then, [3, 0, 1, 2, 4, 5], then):
        assert batch.gather([rows[i] for i in wanted]).rows[:, 0].tolist() == wanted


JOINS, LEAVES, NUM_STEPS = [0, 0, 0, 9, 17], [60, 14, 60, 60, 22], 40


def decode(own: Runner, warm_up_rows: int = 0) -> list[list[Any]]:
    """What rows get that join and leave at these steps; `warm_up_rows`: with a piece of a warm-up between the steps."""
    rows: list[seq.Sequence] = []
    found: list[list[Any]] = [[] for _ in JOINS]
    for number in range(len(JOINS)):
        sampling = SamplingParams(max_tokens=99, temperature=0.8, logprobs=2)
        prompt = [3 + (7 * number + 5 * i) % 50 for i in range(3 + 4 * number)]
        rows.append(seq.Sequence(number, None, prompt, own.new_slot(99), sampling, seed=number))
    for step in range(NUM_STEPS):
        active = [n for n in range(len(rows)) if JOINS[n] <= step < LEAVES[n]]
        if warm_up_rows:
            own.warm_up(warm_up_rows)
        for n, sampled in zip(active, own.decode([rows[n] for n in active]), strict=True):
            row = rows[n]
            row.num_computed_tokens += 1
            if row.num_computed_tokens == len(row.tokens):
                row.tokens.append(sampled.token_id)
                found[n].append((sampled.token_id, sampled.logprob))
    return found


def make_runner(tools, model: Any, room: int = 16) -> Runner:
    accelerate(model)
    accelerate_norms(model)
    return Runner(tools.loaded(model), RunnerOptions(room=room))


@pytest.mark.parametrize("family", [f for f in FAMILIES.values() if not f.refused], ids=lambda f: f.name)
def test_repeated_steps_give_the_same_bits(tools, family, caplog) -> None:
    plain, repeating = (make_runner(tools, family.model()) for _ in range(2))
    plain._replay.reason = "not wanted"
    expected = decode(plain)
    assert decode(repeating) == expected
    assert repeating._replay.reason == ""
    assert repeating._replay.num_repeated >= NUM_STEPS // 2
    assert plain._replay.num_repeated == 0


@pytest.mark.parametrize("family", [f for f in FAMILIES.values() if not f.refused], ids=lambda f: f.name)
def test_after_a_warm_up_every_step_is_a_repetition(tools, family) -> None:
    plain, warm, between = (make_runner(tools, family.model(), room=4) for _ in range(3))
    plain._replay.reason = "not wanted"
    expected = decode(plain)
    while warm.warm_up(5):
        pass
    assert decode(warm) == expected
    assert warm._replay.num_repeated == NUM_STEPS
    assert decode(between, warm_up_rows=5) == expected
    while between.warm_up(5):
        pass
    sizes = [size for size in ALL_JOINT_SIZES if size <= 4 and warm.takes_chunks]
    assert between._replay.num_programs == warm._replay.num_programs == 5 * (1 + len(sizes))


@pytest.mark.parametrize("room", [64, 128])
def test_chunks_of_a_warm_up_lie_in_one_piece_in_a_window(tools, room, monkeypatch) -> None:
    """Rows were located one by one: in the middle of a chunk a window slid, and the kernel read before it."""
    own, spans = make_runner(tools, FAMILIES["MiMoV2Flash"].model(), room=room), []
    rows = own._attention.rows

    def watched(slots: Any, starts: Any, num_chunk: int = 0) -> Any:
        before = slots[-1]._located
        made = rows(slots, starts, num_chunk)
        spans.append((num_chunk, num_chunk == 0 or slots[-1]._located is before))
        return made

    monkeypatch.setattr(own._attention, "rows", watched)
    while own.warm_up(1):
        pass
    assert max(num for num, _ in spans) == 64 and all(is_one for _, is_one in spans)


def test_a_warm_up_without_memory_ends(tools, monkeypatch, caplog) -> None:
    own = make_runner(tools, tools.tiny_model("Llama"))
    expected = decode(own)
    own = make_runner(tools, tools.tiny_model("Llama"))
    new_slot, left = own.new_slot, iter(range(2))

    def scarce(num_tokens: int) -> SlotState:
        if next(left, None) is None:
            raise RequestFailed("no memory")
        return new_slot(num_tokens)

    monkeypatch.setattr(own, "new_slot", scarce)
    while own.warm_up(5):
        pass
    assert "no memory to record decode steps before they are needed: no memory" in caplog.text
    assert own._replay.num_programs == 2
    monkeypatch.undo()
    assert decode(own) == expected


def test_large_recurrent_states_bound_a_warm_up() -> None:
    assert warm_up_sizes(3, 0) == [1, 2, 3]
    assert warm_up_sizes(3, 1 << 20) == [3, 1, 2]
    assert warm_up_sizes(16, 10 << 20) == [3, 1, 2]
    assert warm_up_sizes(16, 1 << 30) == []


def rows_of(own: Runner, num_rows: int) -> list[seq.Sequence]:
    sampling = SamplingParams(max_tokens=99, temperature=0.0)
    return [seq.Sequence(n, None, [3 + n], own.new_slot(99), sampling) for n in range(num_rows)]


@pytest.mark.parametrize("after", [0, 1, 2, 4, 7, 11])
def test_a_larger_batch_during_a_warm_up_costs_recordings_and_no_more(tools, after) -> None:
    """It moves the memory of recurrent states, that all programs are about."""
    own = make_runner(tools, FAMILIES["Qwen3Next"].model())
    for _ in range(after):
        assert own.warm_up(4)
    own.decode(rows_of(own, 9))
    while own.warm_up(4):
        pass
    assert own._replay.reason == ""
    assert all(own._is_recorded(n) for n in range(1, 5))
    num = own._replay.num_repeated
    own.decode(rows_of(own, 2))
    assert own._replay.num_repeated == num + 1


def test_moved_memory_makes_recordings_useless_at_once(tools) -> None:
    own = make_runner(tools, FAMILIES["Mamba2"].model())
    while own.warm_up(3):
        pass
    own.decode(rows_of(own, 9))
    assert not any(own._is_recorded(n) for n in range(1, 4))
    assert own._replay.num_programs == 0


@pytest.mark.parametrize("family", ["Llama", "Qwen3Next"])
def test_a_warm_up_leaves_no_state_behind(tools, family, monkeypatch) -> None:
    own, made = make_runner(tools, FAMILIES[family].model()), []
    new_slot = own.new_slot
    monkeypatch.setattr(own, "new_slot", lambda num_tokens: made.append(new_slot(num_tokens)) or made[-1])
    while own.warm_up(3):
        pass
    assert len(made) >= 3
    assert all(slot.num_bytes == {} for slot in made)


def test_running_out_of_memory_ends_a_warm_up_and_nothing_else(tools, monkeypatch, caplog) -> None:
    own, plain = (make_runner(tools, FAMILIES["Mamba2"].model()) for _ in range(2))
    expected = decode(plain)

    def full(_slots: Any) -> Any:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")

    monkeypatch.setattr(own._batch, "gather", full)
    assert not own.warm_up(3)
    assert "no memory to record decode steps before they are needed" in caplog.text
    monkeypatch.undo()
    assert decode(own) == expected
    assert own._replay.num_repeated


def test_where_torch_attends_the_model_goes_on_as_it_is(tools, caplog) -> None:
    model = tools.tiny_model("Gemma2", attn_logit_softcapping=20.0, query_pre_attn_scalar=16)
    own = make_runner(tools, model)
    with caplog.at_level(logging.INFO):
        found = decode(own)
    assert "decode steps run the model's own code each time: torch attends" in caplog.text
    assert own._replay.num_repeated == 0
    own._replay.reason = "not wanted"
    assert decode(own) == found


@pytest.mark.parametrize("spoil", ["conj", "squeeze"])
def test_a_wrong_repetition_leaves_nothing_behind(tools, spoil) -> None:
    """A hook does what a program cannot, or does wrong: tokens stay those of the model's own code."""

    def hook(_module: Any, _args: Any, out: torch.Tensor) -> torch.Tensor:
        if spoil == "conj":
            return out + torch.view_as_complex(out.unflatten(-1, (-1, 2)).contiguous()).conj().abs().mean()
        return out.add(1.0).unsqueeze(0).squeeze_(0)

    plain, repeating = (make_runner(tools, tools.tiny_model("Llama")) for _ in range(2))
    plain._replay.reason = "not wanted"
    for own in (plain, repeating):
        own._model.model.layers[1].mlp.register_forward_hook(hook)
    assert decode(repeating) == decode(plain)
    assert repeating._replay.reason


def test_impossible_tokens_do_not_keep_a_batch_from_being_repeated(tools) -> None:
    own = make_runner(tools, tools.tiny_model("Llama"))
    own._model.lm_head.register_forward_hook(lambda _m, _a, out: out.index_fill(-1, torch.tensor([5]), -torch.inf))
    decode(own)
    assert own._replay.num_repeated >= NUM_STEPS // 2


@pytest.mark.parametrize("family", ["Llama", "Gemma3Text", "Mistral", "GptOss", "DeepseekV3", "Qwen3Moe"])
def test_a_chunk_shares_the_forward_of_decode_rows(tools, family) -> None:
    """Its rows are what a chunk alone computes, and the decode rows do not notice it."""
    alone, joint = (make_runner(tools, FAMILIES[family].model()) for _ in range(2))
    alone._replay.reason = "not wanted"
    assert joint.takes_chunks
    prompt = [3 + (5 * i) % 90 for i in range(90)]
    pairs = []
    for own in (alone, joint):
        sampling = SamplingParams(max_tokens=99, temperature=0.0)
        rows = [seq.Sequence(n, None, [3 + n, 9, 4][: n + 1], own.new_slot(120), sampling) for n in range(3)]
        pairs.append((rows, seq.Sequence(9, None, list(prompt), own.new_slot(120), sampling)))
    sizes = [8] * 9 + [3, 5, 1, 8]
    for step, size in enumerate(sizes):
        start = sum(sizes[:step])
        for own, (rows, long) in zip((alone, joint), pairs, strict=True):
            chunk = seq.Chunk(long, start, start + size)
            if own is alone:
                sampled = own.decode(rows)
                own.prefill(chunk, lambda _layer: None)
            else:
                sampled = own.decode(rows, chunk)
            for row, out in zip(rows, sampled, strict=True):
                row.num_computed_tokens += 1
                if row.num_computed_tokens == len(row.tokens):
                    row.tokens.append(out.token_id)
            long.num_computed_tokens = start + size
    assert [row.tokens for row in pairs[0][0]] == [row.tokens for row in pairs[1][0]]
    assert joint._replay.num_repeated >= 3
    for number, spec in enumerate(alone.facts.layout.states):
        first, stop = spec.needed_from(sum(sizes)), sum(sizes)
        for own, other in zip(*(long.slot.read(number, first, stop) for _, long in pairs), strict=True):
            assert torch.allclose(own, other, atol=2e-4, rtol=1e-3), (number, (own - other).abs().max())
