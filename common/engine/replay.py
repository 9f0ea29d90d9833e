"""Decode steps without the model's Python code, which takes about as long as the arithmetic of a small model.

A forward over B rows does the same each time but for its inputs and for where the rows lie. `Replay` lets the first
forwards of each B run as they are, records the next two, and if both did the same, repeats that from then on
(program.py). Where that is impossible (a loop over chosen experts, attention left to torch), forwards stay as they
are, said once in the log. Used by the runner, on the engine thread.
"""

from __future__ import annotations

import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from common.engine.memory import trim
from common.engine.program import Arena, NotReplayable, Program
from common.engine.slot_cache import SlotContext
from common.engine.tape import Summary, Tape

log = logging.getLogger(__name__)

# Numbers of rows whose programs are kept, each with the activations of a step and two dozen kilobytes per layer.
MAX_PROGRAMS = 128
# A recording takes about two steps' time, the second with what is made of it about four: not for rare batch sizes.
NUM_BEFORE = 3
# Of a sequence in a warm-up, and what the recurrent states of one may take in all.
WARM_UP_TOKENS, MAX_WARM_UP_BYTES = 3, 256 << 20

Run = Callable[[], torch.Tensor]


@dataclass(slots=True)
class _Entry:
    """What is known about one number of rows, and of rows with logits."""

    fixed: object = None  # the recurrent states that it is about
    num_seen: int = 0
    first: Summary | None = None
    program: Program | None = None


class Replay:
    """Forwards of one model. `reason` is empty, or says why nothing is repeated.

    Attributes:
        num_repeated: forwards that ran without the model's code.
        is_settled: the last forward is like all further ones of its kind.
    """

    def __init__(self) -> None:
        self.reason = ""
        self.num_repeated = 0
        self.is_settled = True
        self._arena = Arena()
        self._entries: OrderedDict[tuple[int, int], _Entry] = OrderedDict()

    def is_recorded(self, num_rows: int) -> bool:
        """Whether steps of so many rows, without a chunk, are repeated from now on."""
        entry = self._entries.get((num_rows, num_rows))
        return entry is not None and entry.program is not None

    @property
    def num_programs(self) -> int:
        """Kinds of steps that are repeated."""
        return sum(entry.program is not None for entry in self._entries.values())

    def forward(
        self, context: SlotContext, inputs: tuple[torch.Tensor, ...], run: Run, *, records: bool = False
    ) -> torch.Tensor:
        """Logits of decode rows, valid until the next forward; `run` computes them from `inputs` as the model does.

        `records`: even if such forwards were rare so far.
        """
        self.is_settled = True
        if self.reason:
            return run()
        entry = self._entry(context)
        entry.num_seen += 1
        if entry.program is not None:
            self.num_repeated += 1
            with _current(context):
                return entry.program.run(*inputs)
        self.is_settled = False
        if entry.num_seen <= NUM_BEFORE and not records:
            return run()
        return self._record(entry, context, inputs, run)

    def _entry(self, context: SlotContext) -> _Entry:
        kind = (len(context.slots), context.num_sampled)
        entry = self._entries.get(kind)
        if entry is not None and entry.fixed is not context.fixed:
            self._entries.clear()  # the memory of recurrent states has moved
            entry = None
        if entry is None:
            entry = self._entries[kind] = _Entry(context.fixed)
        self._entries.move_to_end(kind)
        if len(self._entries) > MAX_PROGRAMS:
            self._entries.popitem(last=False)
        return entry

    def _record(self, entry: _Entry, context: SlotContext, inputs: tuple[torch.Tensor, ...], run: Run) -> torch.Tensor:
        states = context.fixed.rows if context.fixed is not None else torch.empty(0)
        before = states.clone()
        with Tape(inputs) as tape:
            logits = run()
        if logits.isnan().any():  # cannot be compared; perhaps the next can
            return logits
        first, entry.first = entry.first, None
        if reason := tape.reason or (first.difference(tape) if first is not None else ""):
            self._give_up(reason)
        elif first is None:
            entry.first = tape.summary()
        else:
            after = states.clone()
            states.copy_(before)
            entry.program = self._program(tape, context, (logits, after), states)
            if entry.program is None:
                states.copy_(before)
                return run()  # the repetition was wrong, and so is what it wrote into the slots
            del tape
            trim()
        return logits

    def _program(
        self, tape: Tape, context: SlotContext, expected: tuple[torch.Tensor, torch.Tensor], states: torch.Tensor
    ) -> Program | None:
        """Checked against `expected` logits and recurrent states."""
        logits, after = expected
        try:
            with _current(context):
                made = Program(tape, logits, self._arena)
            if not (torch.equal(made.output, logits) and torch.equal(states, after)):
                raise NotReplayable("repeating the forward gave another result")
        except Exception as e:  # noqa: BLE001 - whatever a model's operators raise when called like this
            self._give_up(str(e) if isinstance(e, NotReplayable) else f"{type(e).__name__}: {e}")
            return None
        return made

    def _give_up(self, reason: str) -> None:
        self.reason = reason
        self._entries.clear()
        log.info("decode steps run the model's own code each time: %s", reason)


@dataclass(frozen=True, slots=True)
class WarmUpStep:
    """One decode step of a warm-up: where its rows start, and whether it is one to record."""

    starts: tuple[int, ...]
    is_recorded: bool


def warm_up_steps(max_rows: int, row_bytes: int) -> Iterator[WarmUpStep]:
    """What to run, on slots of WARM_UP_TOKENS, to have 1, 2, .. rows recorded; `row_bytes`: recurrent state of one.

    Few rows first; with recurrent state the most of all before them, since its memory must not move afterwards.
    """
    max_rows = min(max_rows, MAX_WARM_UP_BYTES // max(row_bytes, 1))
    sizes = [*range(1, max_rows + 1)]
    for num in sizes[-1:] + sizes[:-1] if row_bytes else sizes:
        yield WarmUpStep((0,) * num, is_recorded=False)
        yield WarmUpStep((1,) * num, is_recorded=True)
        yield WarmUpStep(tuple(1 + i % 2 for i in range(num)), is_recorded=True)


def _current(context: SlotContext) -> contextlib.AbstractContextManager[None]:
    return context.rows.as_current() if context.rows is not None else contextlib.nullcontext()
