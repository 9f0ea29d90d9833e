"""One choice of one request as it grows: tokens become text, stop strings end it, log probabilities wait to be sent.

Knows neither HTTP nor response shapes. Fed by fanout.py, emptied by the streaming and the whole-answer writers.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Literal

from common.errors import RequestFailed
from common.request import PromptLogprobs, TokenLogprob, TokenOutput
from common.text.detokenizer import Detokenizer, StopStrings
from common.text.tokenizer import Tokenizer
from decoded.api.prompts import Prompt
from decoded.api.schema import Params

Finish = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class LogprobEntry:
    """One token with its log probability; `logprob` None for the first prompt token. `text_offset` in characters."""

    token_id: int
    logprob: TokenLogprob | None
    text_offset: int


@dataclass(slots=True)
class Delta:
    """What became ready since the last take."""

    text: str
    entries: list[LogprobEntry]
    finish: Finish | None


@dataclass(slots=True)
class Choice:
    """State of one choice. `index` is its number in the response, `number` the one within its request."""

    index: int
    number: int
    prompt: Prompt
    params: Params
    tokenizer: Tokenizer
    tokens: array[int] = field(default_factory=lambda: array("I"))
    finish: Finish | None = None
    _texts: list[str] = field(default_factory=list)
    _entries: list[LogprobEntry] = field(default_factory=list)
    _is_finish_taken: bool = False
    _offset: int = 0
    _detokenizer: Detokenizer = field(init=False)
    _stops: StopStrings = field(init=False)

    def __post_init__(self) -> None:
        self._detokenizer = self.tokenizer.detokenizer()
        self._stops = StopStrings(self.params.stop)
        if self.params.echo:
            self._texts.append(self.prompt.text or "")

    def add_prompt(self, event: PromptLogprobs) -> None:
        """The prompt's log probabilities come before the first token's."""
        tokens, text = self.prompt.tokens, self.prompt.text or ""
        detokenizer = self.tokenizer.detokenizer(skip_special_tokens=False)
        for position, (token_id, logprob) in enumerate(zip(tokens, event.logprobs, strict=True)):
            self._entries.append(LogprobEntry(token_id, logprob, self._offset))
            if position >= self.prompt.num_added:
                self._offset += len(detokenizer.add(token_id))
        self._offset = len(text)

    def add(self, output: TokenOutput) -> bool:
        """Take one sampled token. True when a stop string ended the choice and the engine must be told.

        Raises:
            RequestFailed: the engine gave the choice up.
        """
        if self.finish is not None:
            return False
        if output.finish_reason in ("abort", "error"):
            raise RequestFailed(f"The engine ended choice {self.index} with {output.finish_reason!r}.")
        if self.params.max_tokens == 0:  # echo alone: the engine's one token is not part of the answer
            self.finish = "length"
            return False
        self.tokens.append(output.token_id)
        delta = self._detokenizer.add(output.token_id)
        if output.finish_reason is not None:
            delta += self._detokenizer.flush()
        if self.params.logprobs is not None:
            self._entries.append(LogprobEntry(output.token_id, output.logprob, self._offset))
            self._offset += len(delta)
        is_stopped = self._add_text(delta)
        if is_stopped:
            self.finish = "stop"
        elif output.finish_reason is not None:
            self._texts.append(self._stops.flush())
            self.finish = "length" if output.finish_reason == "length" else "stop"
        return is_stopped and output.finish_reason is None

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer so far."""
        return len(self.tokens)

    @property
    def num_entries(self) -> int:
        """Log probabilities waiting to be taken."""
        return len(self._entries)

    def take(self, *, with_finish: bool = True, max_entries: int | None = None) -> Delta | None:
        """What is ready to be sent, None if nothing is. The finish reason is held back unless `with_finish`.

        With more than `max_entries` log probabilities, that many leave alone and the rest at the next take.
        """
        if max_entries is not None and len(self._entries) > max_entries:
            entries, self._entries = self._entries[:max_entries], self._entries[max_entries:]
            return Delta("", entries, None)
        finish = self.finish if with_finish and not self._is_finish_taken else None
        text = "".join(self._texts) if self._texts else ""
        entries = self._entries
        if not text and not entries and finish is None:
            return None
        self._texts, self._entries = [], []
        self._is_finish_taken = self._is_finish_taken or finish is not None
        return Delta(text, entries, finish)

    def _add_text(self, delta: str) -> bool:
        if not delta:
            return False
        text, is_stopped = self._stops.add(delta, is_checked=self._is_stop_checked())
        if text:
            self._texts.append(text)
        return is_stopped

    def _is_stop_checked(self) -> bool:
        """Like EOS, a stop string counts only after min_tokens tokens."""
        return self.num_tokens > self.params.sampling.min_tokens
