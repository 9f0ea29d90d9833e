"""Whether the next turn of a chat begins with the tokens that were computed for the turn before: counted, nothing else.

A client sends back the text of an answer, and the chat template makes tokens of the whole conversation anew. They are
others than were generated where the client trims the text, where the template leaves out what was said (thoughts, say),
or where a text can be spelled in several ways; cached state is of use up to there only. Knows neither HTTP nor caches.
Lives on the event loop, where nothing it does grows with a prompt; texts are hashed and tokens compared in threads.
"""

from __future__ import annotations

import hashlib
import json
import logging
from array import array
from collections import OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

MAX_CONVERSATIONS = 1000
MAX_TOKENS = 1 << 22  # of all conversations together, 4 bytes each
MAX_ANSWERS = 4  # to the same conversation
_TOKEN = array("I").itemsize

log = logging.getLogger(__name__)


class Count(Protocol):
    """A counter with the label `result`."""

    def labels(self, result: str) -> Any: ...


@dataclass(frozen=True, slots=True)
class Turn:
    """A chat request: digests of its messages and of those before its last answer (None: there is none), and its prompt
    as raw 32-bit token ids.
    """

    conversation: bytes
    before: bytes | None
    prompt: bytes


def turn_of(messages: Sequence[dict[str, Any]], tokens: Sequence[int]) -> Turn:
    """The turn that these messages ask for, rendered as these tokens."""
    last = max((n for n, message in enumerate(messages) if message["role"] == "assistant"), default=-1)
    state, before = hashlib.sha256(), None
    for number, message in enumerate(messages):
        if number == last:
            before = state.digest()
        state.update(json.dumps(message, sort_keys=True).encode() + b"\n")
    return Turn(state.digest(), before, array("I", tokens).tobytes())


@dataclass(slots=True)
class _Known:
    """A conversation that was answered: the tokens of its prompt, and of its latest answers without the last."""

    prompt: bytes
    answers: deque[bytes] = field(default_factory=lambda: deque(maxlen=MAX_ANSWERS))

    @property
    def num_tokens(self) -> int:
        return (len(self.prompt) + sum(map(len, self.answers))) // _TOKEN


class TurnMemory:
    """The conversations answered last, apart for each tenant."""

    def __init__(self, continuations: Count, threads: ThreadPoolExecutor) -> None:
        self._continuations, self._threads = continuations, threads
        self._known: OrderedDict[tuple[str, bytes], _Known] = OrderedDict()
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._known)

    def answered(self, tenant: str, turn: Turn, output: Sequence[int]) -> None:
        """One choice of this turn came to its end with these tokens. The last was never computed: no state has it."""
        key = (tenant, turn.conversation)
        known = self._known.pop(key, None)
        if known is None:
            known = _Known(turn.prompt)
        else:
            self.num_tokens -= known.num_tokens
            known.prompt = turn.prompt  # a template may know what day it is
        known.answers.append(array("I", output[:-1]).tobytes())
        self._known[key] = known
        self.num_tokens += known.num_tokens
        while len(self._known) > MAX_CONVERSATIONS or self.num_tokens > MAX_TOKENS:
            _, oldest = self._known.popitem(last=False)
            self.num_tokens -= oldest.num_tokens

    def asked(self, tenant: str, turn: Turn, request_id: str) -> None:
        """A request was submitted: should it continue a conversation that is remembered, have its tokens compared."""
        key = (tenant, turn.before or b"")
        known = self._known.get(key)
        if known is None:
            return
        self._known.move_to_end(key)
        try:
            self._threads.submit(self._compare, turn.prompt, known.prompt, tuple(known.answers), request_id)
        except RuntimeError:  # the threads are stopped: so is the daemon
            return

    def _compare(self, tokens: bytes, prompt: bytes, answers: tuple[bytes, ...], request_id: str) -> None:
        """With the answer that it has most of."""
        num_shared, num = max((_num_shared(tokens, prompt + a), (len(prompt) + len(a)) // _TOKEN) for a in answers)
        self._continuations.labels("same" if num_shared == num else "diverged").inc()
        if num_shared < num:
            facts = {"request_id": request_id, "at_token": num_shared, "num_computed_tokens": num}
            log.debug("the conversation is told otherwise than it was generated", extra=facts)


def _num_shared(a: bytes, b: bytes) -> int:
    """Tokens at the beginning of both that are equal, by halving: bytes are compared far quicker than tokens."""
    low, high = 0, min(len(a), len(b)) // _TOKEN
    while low < high:
        middle = (low + high + 1) // 2
        if a[low * _TOKEN : middle * _TOKEN] == b[low * _TOKEN : middle * _TOKEN]:
            low = middle
        else:
            high = middle - 1
    return low
