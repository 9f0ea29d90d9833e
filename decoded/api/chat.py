"""The JSON of /v1/chat/completions: whole answers, stream chunks, log probabilities with the tokens' bytes.

Pure. The first chunk of a choice carries the role.
"""

from __future__ import annotations

from typing import Any

from common.text.tokenizer import Tokenizer
from decoded.api.choices import Choice, Delta, LogprobEntry
from decoded.api.fanout import Fanout
from decoded.api.shapes import Head, answer, event, spell, spell_logprob, usage


class ChatShape:
    """Builds one request's chat.completion and chat.completion.chunk objects."""

    def __init__(self, head: Head, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._whole_base = {
            "id": f"chatcmpl-{head.request_id}",
            "object": "chat.completion",
            "created": head.created,
            "model": head.model,
        }
        self._base = {**self._whole_base, "object": "chat.completion.chunk"}
        start = spell(self._base)[:-1]
        self._start = f'data: {start},"choices":[{{"index":'
        self._end = "}]," + '"usage":null}\n\n' if head.has_usage_field else "}]}\n\n"
        self._has_usage_field = head.has_usage_field

    def opening(self, choice: Choice) -> bytes:
        return self._event(choice, {"role": "assistant", "content": ""}, Delta("", [], None), None)

    def chunk(self, choice: Choice, delta: Delta, prfaas: Any = None) -> bytes:
        if prfaas is None and not delta.entries and delta.finish is None:  # the common case, once per token: no dicts
            text = spell(delta.text)
            fields = f'{choice.index},"delta":{{"content":{text}}},"logprobs":null,"finish_reason":null'
            return (self._start + fields + self._end).encode()
        return self._event(choice, {"content": delta.text} if delta.text else {}, delta, prfaas)

    def tail(self, fanout: Fanout, prfaas: Any) -> bytes:
        chunk: dict[str, Any] = {**self._base, "choices": [], "usage": usage(fanout)}
        if prfaas is not None:
            chunk["prfaas"] = prfaas
        return event(chunk)

    def whole(self, fanout: Fanout, prfaas: Any) -> bytes:
        choices = (self._whole_choice(c, c.take() or Delta("", [], c.finish)) for c in fanout.choices)
        return answer(self._whole_base, choices, fanout, prfaas)

    def _event(self, choice: Choice, message: dict[str, Any], delta: Delta, prfaas: Any) -> bytes:
        logprobs = self._logprobs(choice, delta.entries) if delta.entries else None
        inner = {"index": choice.index, "delta": message, "logprobs": logprobs, "finish_reason": delta.finish}
        chunk: dict[str, Any] = {**self._base, "choices": [inner]}
        if self._has_usage_field:
            chunk["usage"] = None
        if prfaas is not None:
            chunk["prfaas"] = prfaas
        return event(chunk)

    def _whole_choice(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": delta.text, "refusal": None},
            "logprobs": self._logprobs(choice, delta.entries) if choice.params.logprobs is not None else None,
            "finish_reason": delta.finish,
        }

    def _logprobs(self, choice: Choice, entries: list[LogprobEntry]) -> dict[str, Any]:
        num_top = choice.params.logprobs or 0
        return {"content": [self._entry(entry, num_top) for entry in entries], "refusal": None}

    def _entry(self, entry: LogprobEntry, num_top: int) -> dict[str, Any]:
        found = entry.logprob
        top = found.top[:num_top] if found else ()
        return {
            **self._token(entry.token_id, found.logprob if found else 0.0),
            "top_logprobs": [self._token(token_id, logprob) for token_id, logprob in top],
        }

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self._tokenizer.token_bytes(token_id)
        return {"token": raw.decode("utf-8", "replace"), "logprob": spell_logprob(logprob), "bytes": list(raw)}
