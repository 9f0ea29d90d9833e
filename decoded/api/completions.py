"""The JSON of /v1/completions: whole answers, stream chunks, log probabilities in the parallel-lists form.

Pure. A token that is not whole characters by itself is spelt "bytes:\\xNN..." as OpenAI does.
"""

from __future__ import annotations

from typing import Any

from common.text.tokenizer import Tokenizer
from decoded.api.choices import Choice, Delta, LogprobEntry
from decoded.api.fanout import Fanout
from decoded.api.shapes import Head, answer, event, spell, spell_logprob, usage


class CompletionShape:
    """Builds one request's text_completion objects."""

    def __init__(self, head: Head, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._base = {
            "id": f"cmpl-{head.request_id}",
            "object": "text_completion",
            "created": head.created,
            "model": head.model,
        }
        start = spell(self._base)[:-1]
        self._start = f'data: {start},"choices":[{{"index":'
        self._end = "}]," + '"usage":null}\n\n' if head.has_usage_field else "}]}\n\n"
        self._has_usage_field = head.has_usage_field

    def opening(self, choice: Choice) -> bytes:
        return b""

    def chunk(self, choice: Choice, delta: Delta, prfaas: Any = None) -> bytes:
        if prfaas is None and not delta.entries:  # the common case, once per token: no dicts
            finish = "null" if delta.finish is None else f'"{delta.finish}"'
            text = spell(delta.text)
            fields = f'{choice.index},"text":{text},"logprobs":null,"finish_reason":{finish}'
            return (self._start + fields + self._end).encode()
        chunk: dict[str, Any] = {**self._base, "choices": [self._choice(choice, delta)]}
        if self._has_usage_field:
            chunk["usage"] = None
        if prfaas is not None:
            chunk["prfaas"] = prfaas
        return event(chunk)

    def tail(self, fanout: Fanout, prfaas: Any) -> bytes:
        chunk: dict[str, Any] = {**self._base, "choices": [], "usage": usage(fanout)}
        if prfaas is not None:
            chunk["prfaas"] = prfaas
        return event(chunk)

    def whole(self, fanout: Fanout, prfaas: Any) -> bytes:
        choices = (self._choice(c, c.take() or Delta("", [], c.finish)) for c in fanout.choices)
        return answer(self._base, choices, fanout, prfaas)

    def _choice(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        has_logprobs = choice.params.logprobs is not None
        return {
            "index": choice.index,
            "text": delta.text,
            "logprobs": self._logprobs(delta.entries, choice.params.logprobs or 0) if has_logprobs else None,
            "finish_reason": delta.finish,
        }

    def _logprobs(self, entries: list[LogprobEntry], num_top: int) -> dict[str, Any]:
        return {
            "tokens": [self._spell(entry.token_id) for entry in entries],
            "token_logprobs": [e.logprob and spell_logprob(e.logprob.logprob) for e in entries],
            "top_logprobs": [self._top(entry, num_top) for entry in entries],
            "text_offset": [entry.text_offset for entry in entries],
        }

    def _top(self, entry: LogprobEntry, num_top: int) -> dict[str, float] | None:
        """The alternatives and always the token itself; of tokens that are spelt alike the likeliest counts."""
        if entry.logprob is None:
            return None
        top: dict[str, float] = {}
        for token_id, logprob in entry.logprob.top[:num_top]:
            top.setdefault(self._spell(token_id), spell_logprob(logprob))
        top.setdefault(self._spell(entry.token_id), spell_logprob(entry.logprob.logprob))
        return top

    def _spell(self, token_id: int) -> str:
        raw = self._tokenizer.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
