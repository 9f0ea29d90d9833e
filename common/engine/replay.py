"""Decode steps without the model's Python code, which takes about as long as the arithmetic of a small model.

A forward over B rows does the same each time but for its inputs and for where the rows lie. `Replay` lets the first
forward of each B run as it is, records the next two, and if both did the same, repeats that (program.py) from then on.
Where that is impossible (experts chosen by value, attention left to torch), forwards stay as they are, said once in
the log. Used by the runner, on the engine thread.
"""

from __future__ import annotations

import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch

from common.engine.program import NotReplayable, Program
from common.engine.slot_cache import SlotContext
from common.engine.tape import Tape

log = logging.getLogger(__name__)

# Batch sizes whose programs are kept, each with the activations of a step and two dozen kilobytes per layer.
MAX_PROGRAMS = 64

Run = Callable[[], torch.Tensor]


@dataclass(slots=True)
class _Entry:
    """What is known about one number of rows."""

    fixed: object = None  # the recurrent states that it is about
    num_seen: int = 0
    tape: Tape | None = None
    program: Program | None = None


class Replay:
    """Forwards of one model. `reason` is empty, or says why nothing is repeated.

    Attributes:
        num_repeated: forwards that ran without the model's code.
    """

    def __init__(self) -> None:
        self.reason = ""
        self.num_repeated = 0
        self._entries: OrderedDict[int, _Entry] = OrderedDict()

    def forward(self, context: SlotContext, inputs: tuple[torch.Tensor, ...], run: Run) -> torch.Tensor:
        """Logits of decode rows, valid until the next forward; `run` computes them from `inputs` as the model does."""
        if self.reason:
            return run()
        entry = self._entry(context)
        entry.num_seen += 1
        if entry.program is not None:
            self.num_repeated += 1
            return _repeat(entry.program, context, inputs)
        if entry.num_seen == 1:  # makes what later ones find made
            return run()
        return self._record(entry, context, inputs, run)

    def _entry(self, context: SlotContext) -> _Entry:
        num_rows = len(context.slots)
        entry = self._entries.get(num_rows)
        if entry is not None and entry.fixed is not context.fixed:
            self._entries.clear()  # the memory of recurrent states has moved
            entry = None
        if entry is None:
            entry = self._entries[num_rows] = _Entry(context.fixed)
        self._entries.move_to_end(num_rows)
        if len(self._entries) > MAX_PROGRAMS:
            self._entries.popitem(last=False)
        return entry

    def _record(self, entry: _Entry, context: SlotContext, inputs: tuple[torch.Tensor, ...], run: Run) -> torch.Tensor:
        states = context.fixed.rows if context.fixed is not None else torch.empty(0)
        before = states.clone()
        with Tape(inputs) as tape:
            logits = run()
        try:
            if tape.reason:
                raise NotReplayable(tape.reason)
            if not logits.isfinite().all():  # cannot be compared; perhaps the next can
                return logits
            if entry.tape is None:
                entry.tape = tape
                return logits
            if found := entry.tape.difference(tape):
                raise NotReplayable(found)
            after, entry.tape = states.clone(), None
            program = Program(tape, logits)
            states.copy_(before)
            repeated = _repeat(program, context, inputs)
            if not (torch.equal(repeated, logits) and torch.equal(states, after)):
                states.copy_(after)
                raise NotReplayable("repeating the forward gave another result")
            entry.program = program
        except NotReplayable as e:
            self.reason = str(e)
            self._entries.clear()
            log.info("decode steps run the model's own code each time: %s", e)
        return logits


def _repeat(program: Program, context: SlotContext, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    with context.rows.as_current() if context.rows is not None else contextlib.nullcontext():
        return program.run(*inputs)
