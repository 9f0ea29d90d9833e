"""The sampler against a plain reference, and what OpenAI and vLLM define for each parameter."""

from __future__ import annotations

import math
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from common.engine.sampler import NUM_CANDIDATES, _filter, _kept_of_best, sample, token_logprobs
from common.request import SamplingParams
from common.sched.sequence import Sequence

EOS = (2,)
VOCAB = 50
PINNED = [36, 43, 39, 40, 49, 8, 35, 4]


def row(prompt=(5, 6, 7), output=(), *, seed=0, choice=0, **params) -> Sequence:
    sampling = SamplingParams(**({"max_tokens": 9, "temperature": 0.0} | params))
    return Sequence(1, None, [*prompt, *output], SimpleNamespace(), sampling, choice=choice, seed=seed,
                    num_prompt_tokens=len(prompt))  # fmt: skip


def logits_of(seed=0, num_rows=1) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def one(logits, sequence):
    return sample(logits, [sequence], EOS)[0]


def shaped_reference(logits, sequence):
    """bias, EOS below min_tokens, penalties: token by token, in the words of the APIs."""
    p = sequence.sampling
    values = [float(v) for v in logits]
    for token, bias in p.logit_bias:
        values[token] += bias
    if sequence.num_output_tokens < p.min_tokens:
        for token in {*EOS, *p.stop_token_ids}:
            values[token] = -math.inf
    counts = Counter(sequence.tokens[sequence.num_prompt_tokens :])
    for token in set(sequence.tokens):
        v = values[token]
        values[token] = v / p.repetition_penalty if v > 0 else v * p.repetition_penalty
    return [v - p.frequency_penalty * counts[t] - p.presence_penalty * (counts[t] > 0) for t, v in enumerate(values)]


def kept_reference(values, p):
    """Token ids that temperature, min_p, top_k and top_p leave, with their probabilities."""
    scaled = [v / p.temperature for v in values]
    best = max(scaled)
    alive = [t for t in range(len(scaled)) if scaled[t] > -math.inf]
    if p.min_p > 0:
        alive = [t for t in alive if math.exp(scaled[t] - best) >= p.min_p]
    alive.sort(key=lambda t: (-scaled[t], t))
    if p.top_k > 0:
        alive = alive[: p.top_k]
    weights = np.exp(np.array([scaled[t] - best for t in alive]))
    weights /= weights.sum()
    kept, mass = [], 0.0
    for token, weight in zip(alive, weights, strict=True):
        if kept and p.top_p < 1 and mass >= p.top_p:
            break
        kept.append((token, weight))
        mass += weight
    total = sum(w for _, w in kept)
    return {t: w / total for t, w in kept}


SHAPES = [
    {},
    {"logit_bias": ((3, 5.0), (4, -100.0))},
    {"min_tokens": 3, "stop_token_ids": (9, 11)},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.7},
    {"frequency_penalty": -0.7, "presence_penalty": -1.0, "repetition_penalty": 1.2, "logit_bias": ((12, 2.0),)},
]


@pytest.mark.parametrize("params", SHAPES)
@pytest.mark.parametrize("seed", range(4))
def test_greedy_takes_the_best_of_the_shaped_logits(params, seed):
    logits = logits_of(seed)
    best = int(logits[0].argmax())
    sequence = row((5, 6, best), (best, 8, 8, best, 12), **params)
    expected = shaped_reference(logits[0], sequence)
    assert one(logits, sequence).token_id == int(np.argmax(expected))


def test_penalties_know_prompt_from_output():
    logits = torch.zeros(1, VOCAB)
    logits[0, 5], logits[0, 6] = 3.0, 2.9
    assert one(logits, row((5,), presence_penalty=2.0, frequency_penalty=2.0)).token_id == 5
    assert one(logits, row((5,), repetition_penalty=2.0)).token_id == 6
    assert one(logits, row((9,), (5,), presence_penalty=2.0)).token_id == 6


def test_ties_go_to_the_lower_id():
    logits = torch.zeros(1, VOCAB)
    logits[0, [7, 20, 33]] = 4.0
    out = one(logits, row(logprobs=4))
    assert out.token_id == 7
    assert [t for t, _ in out.logprob.top] == [7, 20, 33, 0]
    drawn = {one(logits, row(temperature=1.0, top_k=1, seed=s)).token_id for s in range(20)}
    assert drawn == {7}


FILTERS = [
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 2.0, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.7},
    {"temperature": 1.0, "top_p": 1e-9},
    {"temperature": 1.5, "min_p": 0.2},
    {"temperature": 1.3, "top_k": 8, "top_p": 0.8, "min_p": 0.02},
    {"temperature": 1.0, "top_k": VOCAB * 2, "min_p": 1.0},
]


@pytest.mark.parametrize("params", FILTERS)
def test_draws_follow_the_filtered_distribution(params):
    logits, number = logits_of(3), 3000
    expected = kept_reference([float(v) for v in logits[0]], row(**params).sampling)
    rows = [row(seed=s, **params) for s in range(number)]
    drawn = Counter(s.token_id for s in sample(logits.expand(number, VOCAB), rows, EOS))
    assert drawn.keys() <= expected.keys()
    for token, probability in expected.items():
        spread = math.sqrt(probability * (1 - probability) / number)
        assert abs(drawn[token] / number - probability) < 5 * spread + 1e-9, token


@pytest.mark.parametrize("scale", [0.01, 1.0, 4.0])
@pytest.mark.parametrize(
    "params", [{"top_p": 0.3}, {"top_p": 0.9999}, {"top_k": 3000}, {"top_k": 40, "top_p": 0.9}, {"top_k": 2048}]
)
def test_looking_at_the_best_candidates_first_changes_nothing(params, scale):
    """A vocabulary larger than the candidates, with and without equal logits at the edge."""
    generator = torch.Generator().manual_seed(1)
    smooth = torch.randn(3, 3 * NUM_CANDIDATES, generator=generator) * scale
    for work in (smooth, (smooth * 2).round() / 2):
        chosen = [SamplingParams(max_tokens=1, temperature=1.0, **params)] * 3
        whole, is_enough = _kept_of_best(work, chosen, work.shape[-1])
        assert all(is_enough)
        assert torch.equal(_filter(work.clone(), chosen) > -torch.inf, whole > -torch.inf)


def test_a_draw_depends_on_seed_choice_and_index_only():
    logits = logits_of(1, num_rows=6)
    rows = [
        row(temperature=1.0, seed=4),
        row(temperature=0.0),
        row((1, 2), (8,), temperature=1.0, seed=4),
        row(temperature=1.0, seed=4, choice=1, top_p=0.9),
        row(temperature=0.5, seed=2**63 - 1, top_k=3, presence_penalty=1.0),
        row(temperature=1.0, seed=-7),
    ]
    together = [s.token_id for s in sample(logits, rows, EOS)]
    alone = [sample(logits[i : i + 1], [rows[i]], EOS)[0].token_id for i in range(6)]
    backwards = [s.token_id for s in sample(logits.flip(0), rows[::-1], EOS)][::-1]
    assert together == alone == backwards
    flat = torch.zeros(1, VOCAB)
    keys = [(0, 0, ()), (1, 0, ()), (0, 1, ()), (0, 0, (8,)), (0, 0, (8, 8))]
    drawn = [one(flat, row((5,), o, seed=s, choice=c, temperature=1.0)).token_id for s, c, o in keys]
    assert len(set(drawn)) > 2
    # The prompt's length plays no part.
    assert one(flat, row((5,) * 9, (), temperature=1.0)).token_id == drawn[0]


def test_a_seeded_draw_never_changes():
    """Pinned: a new numpy or another machine must not change what a seed gives."""
    flat = torch.zeros(1, VOCAB)
    assert [one(flat, row((5,), (8,) * i, seed=42, temperature=1.0)).token_id for i in range(8)] == PINNED


def test_logprobs_are_of_the_raw_logits():
    logits = logits_of(2)
    expected = torch.log_softmax(logits[0], dim=-1)
    out = one(logits, row(temperature=0.7, top_k=1, logprobs=5, logit_bias=((30, 100.0),)))
    assert out.token_id == 30
    assert out.logprob.logprob == pytest.approx(float(expected[30]), abs=1e-5)
    values, ids = expected.topk(5)
    assert [t for t, _ in out.logprob.top] == ids.tolist()
    assert [v for _, v in out.logprob.top] == pytest.approx(values.tolist(), abs=1e-5)
    assert one(logits, row(logprobs=0)).logprob.top == ()
    assert one(logits, row()).logprob is None


def test_prompt_logprobs_are_of_the_tokens_given():
    logits = logits_of(5, num_rows=3)
    expected = torch.log_softmax(logits, dim=-1)
    found = token_logprobs(logits, [4, 9, 2], 1)
    assert [e.token_id for e in found] == [4, 9, 2]
    assert [e.logprob for e in found] == pytest.approx([float(expected[i, t]) for i, t in enumerate((4, 9, 2))])
    assert [e.top[0][0] for e in found] == expected.argmax(-1).tolist()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_row_without_finite_logits_fails_alone(value):
    logits = logits_of(0, num_rows=3)
    logits[1, 8] = value
    out = sample(logits, [row(), row(temperature=1.0, logprobs=2), row(temperature=1.0)], EOS)
    assert [o.error is None for o in out] == [True, False, True]
    assert out[0].token_id == int(logits[0].argmax())


def test_low_precision_logits_are_sampled_in_float32():
    logits = logits_of(0).to(torch.bfloat16)
    out = one(logits, row(logprobs=1))
    assert out.token_id == int(logits[0].argmax())
    assert out.logprob.logprob == pytest.approx(float(torch.log_softmax(logits[0].float(), -1).max()), abs=1e-5)
