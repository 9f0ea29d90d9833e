"""All generations behind one HTTP request: a request per prompt, a choice per sample, one event when anything moves.

Readers turn outputs into choices' text at the engine's pace; whoever writes to the client takes what has gathered at
the client's pace, so a slow client gets larger deltas and no queue grows. Any way out cancels whatever still runs.
Knows no HTTP. Used by stream.py and app.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import TracebackType

from common.errors import PdError, RequestFailed
from common.request import PromptLogprobs, RequestReport
from common.text.tokenizer import Tokenizer
from decoded.api.choices import Choice
from decoded.api.contract import ActiveRequest
from decoded.api.prepare import Prepared


class Fanout:
    """The running generations of one HTTP request. Use as an async context manager: leaving it cancels the rest."""

    def __init__(
        self,
        prepared: Prepared,
        active: Sequence[ActiveRequest],
        tokenizer: Tokenizer,
        on_finish: Callable[[Choice], None] | None = None,
    ) -> None:
        self.prepared, self._on_finish = prepared, on_finish
        self.changed = asyncio.Event()
        self.error: PdError | None = None
        self._active = list(active)
        self._readers: list[asyncio.Task[None]] = []
        self._num_reading = len(self._active)
        width = prepared.params.num_choices
        self.choices = [
            Choice(width * row + number, number, prompt, prepared.params, tokenizer)
            for row, prompt in enumerate(prepared.prompts)
            for number in range(width)
        ]
        self._num_open = len(self.choices)

    async def __aenter__(self) -> Fanout:
        self._readers = [asyncio.create_task(self._read(row)) for row in range(len(self._active))]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for active in self._active:
            active.cancel()
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)

    @property
    def is_done(self) -> bool:
        """True when every generation ended and its report is complete, or one failed."""
        return self._num_reading == 0 or self.error is not None

    @property
    def is_sampled(self) -> bool:
        """True when every choice has its last token, though reports may not be complete yet."""
        return self._num_open == 0

    @property
    def num_entries(self) -> int:
        """Log probabilities waiting to be sent."""
        return sum(choice.num_entries for choice in self.choices)

    @property
    def reports(self) -> list[RequestReport]:
        """One report per prompt."""
        return [active.report for active in self._active]

    async def wait_changed(self) -> None:
        """Until something happened since the last call, or somebody set the event to have the waiter look around."""
        await self.changed.wait()
        self.changed.clear()

    def raise_for_bug(self) -> None:
        """Let an exception that is no PdError out of its reader: a bug, to be logged with its traceback."""
        for reader in self._readers:
            if reader.done() and not reader.cancelled():
                reader.result()

    async def _read(self, row: int) -> None:
        width = self.prepared.params.num_choices
        choices = self.choices[width * row : width * (row + 1)]
        active = self._active[row]
        try:
            async for output in active:
                if isinstance(output, PromptLogprobs):
                    for choice in choices:
                        choice.add_prompt(output)
                    continue
                choice = choices[output.choice]
                was_open = choice.finish is None
                if choice.add(output):
                    active.cancel(output.choice)
                if was_open and choice.finish is not None:
                    self._num_open -= 1
                    if self._on_finish is not None:
                        self._on_finish(choice)
                self.changed.set()
            if any(choice.finish is None for choice in choices):
                raise RequestFailed("The generation ended before its last token.")
        except PdError as error:
            self.error = self.error or error
        finally:
            self._num_reading -= 1
            self.changed.set()
