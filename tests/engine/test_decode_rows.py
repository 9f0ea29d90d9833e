"""Models decode through the attention kernels: every family, what falls back to torch, and without kernels at all."""

from __future__ import annotations

import pytest
import torch

from common.engine import decode_rows
from common.engine.attention import slot_attention
from common.engine.runner import Runner, RunnerOptions
from common.engine.slot_cache import SlotCache
from common.engine.state import SlotState
from common.request import SamplingParams
from common.sched.executor import Sampled
from common.sched.sequence import Chunk, Sequence
from tests.engine.families import FAMILIES

CARRIED = [name for name, family in FAMILIES.items() if not family.refused]


def runner_of(tools, model, **options) -> Runner:
    return Runner(tools.loaded(model), RunnerOptions(**({"threads": 1, "room": 24} | options)))


def sequences(runner: Runner, tools, lengths, room: int = 12) -> list[Sequence]:
    """Prefilled but for the last token."""
    made = []
    for number, length in enumerate(lengths):
        prompt = list(tools.prompt(length, seed=number))
        one = Sequence(
            number, None, prompt, runner.new_slot(length + room), SamplingParams(max_tokens=99, temperature=0.0)
        )
        for start in range(0, length - 1, 24):
            stop = min(length - 1, start + 24)
            runner.prefill(Chunk(one, start, stop), lambda _n: None)
        one.num_computed_tokens = length - 1
        made.append(one)
    return made


def step(runner: Runner, rows: list[Sequence]) -> list[Sampled]:
    sampled = runner.decode(rows)
    for row, one in zip(rows, sampled, strict=True):
        row.tokens.append(one.token_id)
        row.num_computed_tokens += 1
    return sampled


def never(*_args):
    raise AssertionError("torch attended to a decode row")


@pytest.mark.parametrize("family", CARRIED)
def test_every_family_decodes_by_kernels(tools, monkeypatch, family) -> None:
    runner = runner_of(tools, FAMILIES[family].model())
    assert (runner._attention is None) == (not any(s.is_rows for s in runner.facts.layout.states))
    lengths = (1, 5, 17, 30)
    by_kernels, by_torch = sequences(runner, tools, lengths), sequences(runner, tools, lengths)
    kernels = runner._attention
    for _ in range(10):
        runner._attention = None
        step(runner, by_torch)
        runner._attention = kernels
        with monkeypatch.context() as patch:
            patch.setattr(SlotState, "read", never)
            patch.setattr(SlotState, "write", never)
            step(runner, by_kernels)
    assert [s.tokens for s in by_kernels] == [s.tokens for s in by_torch]
    for mine, other in zip(by_kernels, by_torch, strict=True):
        stop = mine.num_computed_tokens
        for number, spec in enumerate(runner.facts.layout.states):
            if spec.is_rows:
                first = spec.needed_from(stop)
                pairs = zip(mine.slot.read(number, first, stop), other.slot.read(number, first, stop), strict=True)
                for a, b in pairs:
                    torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def test_soft_capped_scores_are_left_to_torch(tools, monkeypatch) -> None:
    kinds = ["sliding_attention", "full_attention"] * 2
    model = tools.tiny_model("Gemma2", layer_types=kinds, sliding_window=16, query_pre_attn_scalar=16)
    runner = runner_of(tools, model)
    assert runner._attention is not None
    rows, alone = sequences(runner, tools, (20, 3)), sequences(runner, tools, (20, 3))
    kernels = runner._attention
    for _ in range(10):
        step(runner, rows)
        runner._attention = None
        step(runner, alone)
        runner._attention = kernels
    assert [s.tokens for s in rows] == [s.tokens for s in alone]
    monkeypatch.setattr(SlotState, "read", never)
    with pytest.raises(AssertionError, match="torch attended"):
        runner.decode(rows)


@pytest.mark.parametrize(
    "options", [{"weights": "torch"}, {"kv_dtype": "bfloat16"}, {"kv_dtype": "float16"}, {"dtype": "bfloat16"}], ids=str
)
def test_what_torch_does(tools, options) -> None:
    model = tools.mixed_model()
    runner = runner_of(tools, model.to(getattr(torch, options.get("dtype", "float32"))), **options)
    assert runner._attention is None
    rows = sequences(runner, tools, (20, 3))
    for _ in range(5):
        step(runner, rows)
    assert all(len(s.tokens) == n + 5 for s, n in zip(rows, (20, 3), strict=True))


@pytest.mark.parametrize("family", ["KimiLinear", "Gemma3Text", "GptOss", "FalconH1"])
def test_without_kernels_the_tokens_are_the_same(tools, monkeypatch, family) -> None:
    model = FAMILIES[family].model()
    runner = runner_of(tools, model)
    rows = sequences(runner, tools, (40, 9))
    for _ in range(8):
        step(runner, rows)
    monkeypatch.setattr(decode_rows, "attention", lambda: None)
    other = runner_of(tools, FAMILIES[family].model())
    assert other._attention is None
    plain = sequences(other, tools, (40, 9))
    for _ in range(8):
        step(other, plain)
    assert [s.tokens for s in rows] == [s.tokens for s in plain]


def test_rows_that_nobody_attends_to_are_written_all_the_same(tools) -> None:
    runner = runner_of(tools, tools.tiny_model("Llama"))
    slot = runner.new_slot(8)
    cache = SlotCache(runner._rows_context([slot], [0]))
    key = torch.arange(32.0).view(1, 2, 1, 16)
    cache.update(key, key + 1, 0)
    cache.finish()
    keys, values = slot.read(0, 0, 1)
    assert torch.equal(keys[0], key[0, :, 0]) and torch.equal(values[0], key[0, :, 0] + 1)
    # Attended to for a second time, when nothing is new any more.
    cache = SlotCache(runner._rows_context([slot], [1]))
    cache.update(key, key + 1, 0)
    layer = type("Layer", (), {"layer_idx": 0})()
    query = torch.ones(1, 4, 1, 16)
    once, twice = (slot_attention(layer, query, key, key, None, slot_context=cache.context)[0] for _ in range(2))
    torch.testing.assert_close(once, twice)
