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
    """A race of exponential clocks: token i wins with probability p_i; small errors in p rarely change who wins."""
    work = work / _column([p.temperature for _, p in rows], work)
    work = _filter(work, [p for _, p in rows])
    noise = np.stack([_noise(row.seed, row.choice, row.num_output_tokens, work.shape[1]) for row, _ in rows])
    scores = torch.log_softmax(work, dim=-1) - torch.from_numpy(noise).to(work.device)
    return [int(t) for t in torch.argmax(scores, dim=-1).tolist()]


def _noise(seed: int, choice: int, index: int, size: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """log of exponential variates, one per token id, from (seed, choice, index) alone and alike on every machine."""
    words = np.random.Philox(np.random.SeedSequence((seed % 2**64, choice, index))).random_raw(size)
    uniform = ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return np.log(-np.log(uniform)).astype(np.float32)


def _filter(work: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    """min_p, then top_k, then top_p of what is left; dropped tokens become -inf."""
    if any(p.min_p > 0 for p in params):
        floor = work.amax(dim=-1, keepdim=True) + torch.log(_column([p.min_p for p in params], work))
        work = work.masked_fill(work < floor, -torch.inf)
    if not any(p.top_k > 0 or p.top_p < 1 for p in params):
        return work
    # Stable, so that of equal logits the lower id is kept.
    ordered, ids = torch.sort(work, dim=-1, descending=True, stable=True)
    vocabulary = work.shape[-1]
    ranks = torch.arange(vocabulary, device=work.device)[None, :]
    limits = torch.tensor([p.top_k if p.top_k > 0 else vocabulary for p in params], device=work.device)[:, None]
    ordered = ordered.masked_fill(ranks >= limits, -torch.inf)
    probs = torch.softmax(ordered, dim=-1)
    # The token that reaches top_p is kept: what counts is the mass before it.
    before = probs.cumsum(dim=-1) - probs
    dropped = (before >= _column([p.top_p for p in params], work)) & (ranks > 0)
    dropped &= _column([float(p.top_p < 1) for p in params], work) > 0
    return torch.empty_like(work).scatter_(-1, ids, ordered.masked_fill(dropped, -torch.inf))


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
