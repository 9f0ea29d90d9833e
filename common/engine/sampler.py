"""Chooses tokens from logits, for all rows of a step at once. Stateless: everything follows from the sequences.

Order: logit_bias, EOS suppression below min_tokens, penalties, temperature, min_p, top_k, top_p, draw. Log
probabilities are those of the raw logits, before all of that. A seeded draw depends on (seed, choice, output index) and
the row's own logits only, never on the batch. Ties go to the lower token id.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import torch

from common.errors import RequestFailed
from common.request import SamplingParams, TokenLogprob
from common.sched import sequence as seq
from common.sched.executor import Sampled

Rows = list[tuple[seq.Sequence, SamplingParams]]


def sample(logits: torch.Tensor, rows: Sequence[seq.Sequence], eos_token_ids: tuple[int, ...]) -> list[Sampled]:
    """One token per row of `logits` [rows, vocabulary]; a row without finite logits fails alone."""
    raw = logits.float()
    pairs = [(row, cast("SamplingParams", row.sampling)) for row in rows]
    is_sound = torch.isfinite(raw.amax(dim=-1)).tolist()
    work = _shape(raw, pairs, eos_token_ids)
    tokens = _choose(work, pairs)
    wanted = [p.logprobs if ok else None for (_, p), ok in zip(pairs, is_sound, strict=True)]
    logprobs = _token_logprobs(raw, tokens, wanted)
    failed = RequestFailed("the model put out no finite logits for this sequence")
    return [
        Sampled(token, logprob) if ok else Sampled(-1, None, failed)
        for token, logprob, ok in zip(tokens, logprobs, is_sound, strict=True)
    ]


def token_logprobs(logits: torch.Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprob]:
    """Log probability of `token_ids[i]` under row i of `logits`, with the `num_top` best alternatives."""
    found = _token_logprobs(logits.float(), token_ids, [num_top] * len(token_ids))
    return [entry for entry in found if entry is not None]


# -- what changes the logits


def _shape(raw: torch.Tensor, rows: Rows, eos_token_ids: tuple[int, ...]) -> torch.Tensor:
    """The logits as they are drawn from; `raw` itself when nothing changes them."""
    if not any(p.logit_bias or r.num_output_tokens < p.min_tokens or _has_penalties(p) for r, p in rows):
        return raw
    work = raw.clone()
    for i, (row, params) in enumerate(rows):
        if params.logit_bias:
            ids, values = zip(*params.logit_bias, strict=True)
            bias = torch.tensor(values, dtype=work.dtype, device=work.device)
            work[i].index_add_(0, torch.tensor(ids, device=work.device), bias)
        if row.num_output_tokens < params.min_tokens:
            for token_id in {*eos_token_ids, *params.stop_token_ids}:
                work[i, token_id] = -torch.inf
        if _has_penalties(params):
            _penalise(work[i], row, params)
    return work


def _has_penalties(params: SamplingParams) -> bool:
    return bool(params.presence_penalty or params.frequency_penalty) or params.repetition_penalty != 1.0


def _penalise(row_logits: torch.Tensor, row: seq.Sequence, params: SamplingParams) -> None:
    """Repetition over prompt and output, presence and frequency over the output. In place, [vocabulary]."""
    tokens = torch.tensor(row.tokens, device=row_logits.device)
    counts = torch.bincount(tokens[row.num_prompt_tokens :], minlength=row_logits.shape[0]).to(row_logits.dtype)
    if params.repetition_penalty != 1.0:
        seen = torch.unique(tokens)
        values = row_logits[seen]
        factor = params.repetition_penalty
        row_logits[seen] = torch.where(values > 0, values / factor, values * factor)
    row_logits -= params.frequency_penalty * counts
    row_logits -= params.presence_penalty * (counts > 0)


# -- choosing

# Below this a draw is greedy in all but name, and dividing by it would overflow.
MIN_TEMPERATURE = 1e-5


def _choose(work: torch.Tensor, rows: Rows) -> list[int]:
    best = torch.argmax(work, dim=-1).tolist()
    drawn = [i for i, (_, params) in enumerate(rows) if params.temperature >= MIN_TEMPERATURE]
    if drawn:
        tokens = _draw(work[drawn], [rows[i] for i in drawn])
        for i, token in zip(drawn, tokens, strict=True):
            best[i] = token
    return [int(t) for t in best]


def _draw(work: torch.Tensor, rows: Rows) -> list[int]:
    """A race of exponential clocks: token i wins with probability p_i; small errors in p rarely change who wins.

    Inverting the cumulative distribution would need one random number instead of one per token, but there errors add up
    over the vocabulary and soon exceed the width of a rare token: two routes would draw different ones.
    """
    work = work / _column([p.temperature for _, p in rows], work)
    work = _filter(work, [p for _, p in rows])
    clocks = torch.stack([_log_clocks(row.seed, row.choice, row.num_output_tokens, work.shape[1]) for row, _ in rows])
    scores = torch.log_softmax(work, dim=-1) - clocks.to(work.device)
    return [int(t) for t in torch.argmax(scores, dim=-1).tolist()]


def _log_clocks(seed: int, choice: int, index: int, size: int) -> torch.Tensor:
    """log of exponential variates, one per token id, from (seed, choice, index) alone and alike on every machine."""
    words = np.random.Philox(np.random.SeedSequence((seed % 2**64, choice, index))).random_raw(size)
    # Early clocks win, so those must be exact: -log(1 - v) of a small v, which float32 holds to 24 bits however small.
    small = ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return torch.log(-torch.log1p(-torch.from_numpy(small.astype(np.float32))))


# Of a row's logits this many are sorted first; few distributions need more.
NUM_CANDIDATES = 2048


def _filter(work: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    """min_p, then top_k, then top_p of what is left; dropped tokens become -inf."""
    if any(p.min_p > 0 for p in params):
        floor = work.amax(dim=-1, keepdim=True) + torch.log(_column([p.min_p for p in params], work))
        work = work.masked_fill(work < floor, -torch.inf)
    rows = [i for i, p in enumerate(params) if 0 < p.top_k < work.shape[-1] or p.top_p < 1]
    if not rows:
        return work
    chosen = [params[i] for i in rows]
    part = work[rows]
    kept, is_enough = _kept_of_best(part, chosen, min(NUM_CANDIDATES, part.shape[-1]))
    for n in [n for n, enough in enumerate(is_enough) if not enough]:
        kept[n : n + 1], _ = _kept_of_best(part[n : n + 1], chosen[n : n + 1], part.shape[-1])
    work[rows] = kept
    return work


def _kept_of_best(work: torch.Tensor, params: list[SamplingParams], num_best: int) -> tuple[torch.Tensor, list[bool]]:
    """top_k and top_p looking at the `num_best` largest of each row, and for which rows that was enough."""
    values, ids = torch.topk(work, num_best, dim=-1)
    # By id first, then stably by value: of equal logits the lower id is kept.
    ids = ids.sort(dim=-1).values
    values, order = torch.sort(work.gather(-1, ids), dim=-1, descending=True, stable=True)
    ids = ids.gather(-1, order)
    vocabulary = work.shape[-1]
    limits = torch.tensor([p.top_k if p.top_k > 0 else vocabulary for p in params], device=work.device)[:, None]
    mass = _column([p.top_p if p.top_p < 1 else torch.inf for p in params], work)
    left = values.masked_fill(torch.arange(num_best, device=work.device)[None, :] >= limits, -torch.inf)
    everything = torch.where(limits <= num_best, left.logsumexp(-1, keepdim=True), work.logsumexp(-1, keepdim=True))
    probs = torch.exp(left - everything)
    # The token that reaches top_p is kept: what counts is the mass before it. The best one always stays.
    before = probs.cumsum(dim=-1) - probs
    left[:, 1:] = left[:, 1:].masked_fill(before[:, 1:] >= mass, -torch.inf)
    is_cut = torch.isneginf(left[:, -1])
    # Equal logits beyond the candidates might have lower ids than those among them.
    is_tied = (work == values[:, -1:]).sum(-1) > (values == values[:, -1:]).sum(-1)
    is_enough = [num_best == vocabulary or c for c in (is_cut & ~is_tied | (values[:, -1] == -torch.inf)).tolist()]
    return torch.full_like(work, -torch.inf).scatter_(-1, ids, left), is_enough


def _column(values: list[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]


# -- log probabilities


def _token_logprobs(
    raw: torch.Tensor, tokens: Sequence[int], wanted: Sequence[int | None]
) -> list[TokenLogprob | None]:
    rows = [i for i, num_top in enumerate(wanted) if num_top is not None]
    out: list[TokenLogprob | None] = [None] * len(wanted)
    if not rows:
        return out
    logprobs = torch.log_softmax(raw[rows], dim=-1)
    for row, values in zip(rows, logprobs, strict=True):
        num_top = wanted[row] or 0
        out[row] = TokenLogprob(tokens[row], float(values[tokens[row]]), _top(values, num_top))
    return out


def _top(values: torch.Tensor, num_top: int) -> tuple[tuple[int, float], ...]:
    """Best first, equal ones by id."""
    num_top = min(num_top, values.shape[0])
    if num_top == 0:
        return ()
    least = torch.topk(values, num_top).values[-1]
    ids = torch.nonzero(values >= least)[:, 0].tolist()
    ranked = sorted(((float(values[i]), -i) for i in ids), reverse=True)[:num_top]
    return tuple((-negative, value) for value, negative in ranked)
