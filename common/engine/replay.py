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

from common.engine.memory import is_out_of_memory, trim
from common.engine.program import Arena, NotReplayable, Program
from common.engine.slot_cache import SlotContext
from common.engine.tape import Summary, Tape
from common.sched.budget import ALL_JOINT_SIZES

log = logging.getLogger(__name__)

# Kinds of steps whose programs are kept, each with the activations of a step and two dozen kilobytes per layer: 16
# numbers of rows without a chunk, and with one of each prepared size (budget.py) or a prompt's last few tokens.
MAX_PROGRAMS = 192
# A recording takes about two steps' time, the second with what is made of it about four: not for rare batch sizes.
NUM_BEFORE = 3
# What the recurrent states of a warm-up may take in all: a recording takes ten times that.
MAX_WARM_UP_BYTES = 32 << 20
# Its forwards of each kind: the first is not recorded, the second is, the third makes a program of it.
NUM_WARM_UP_STEPS = 3

Run = Callable[[], torch.Tensor]


@dataclass(slots=True)
class _Entry:
    """What is known about one number of rows, and of rows with logits."""

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
        self._memory: torch.Tensor | None = None  # of the recurrent states that the entries are about

    def is_recorded(self, num_rows: int, num_chunk: int, memory: torch.Tensor | None = None) -> bool:
        """Whether steps of so many rows, and so many tokens of a chunk, are repeated from now on.

        `memory`: of the recurrent states of a batch, as it is now.
        """
        entry = self._entries.get((num_rows + num_chunk, num_rows)) if memory is self._memory else None
        return entry is not None and entry.program is not None

    @property
    def num_programs(self) -> int:
        """Kinds of steps that are repeated."""
        return sum(entry.program is not None for entry in self._entries.values())

    def forward(
        self, context: SlotContext, inputs: tuple[torch.Tensor, ...], run: Run, *, records: bool = False
    ) -> torch.Tensor:
        """Logits of decode rows, valid until the next forward; `run` computes them from `inputs` as the model does.

        `records`: even if such forwards were rare so far (but for the first).
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
        if entry.num_seen <= (1 if records else NUM_BEFORE):
            return run()
        return self._record(entry, context, inputs, run)

    def _entry(self, context: SlotContext) -> _Entry:
        memory = context.fixed.memory if context.fixed is not None else None
        if memory is not self._memory:
            self._memory = memory
            self._entries.clear()
        kind = (len(context.slots), context.num_sampled)
        entry = self._entries.get(kind)
        if entry is None:
            entry = self._entries[kind] = _Entry()
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
            if is_out_of_memory(e):
                log.warning("a decode step could not be recorded: %s", e)
                return None
            self._give_up(str(e) if isinstance(e, NotReplayable) else f"{type(e).__name__}: {e}")
            return None
        return made

    def _give_up(self, reason: str) -> None:
        self.reason = reason
        self._entries.clear()
        log.info("decode steps run the model's own code each time: %s", reason)


def warm_up_sizes(max_rows: int, row_bytes: int) -> list[int]:
    """Numbers of rows to have recorded, in order; `row_bytes`: recurrent state of one.

    Few rows first; with recurrent state the most of all before them, since its memory must not move afterwards.
    """
    sizes = [*range(1, min(max_rows, MAX_WARM_UP_BYTES // max(row_bytes, 1)) + 1)]
    return sizes[-1:] + sizes[:-1] if row_bytes else sizes


def warm_up_kinds(max_rows: int, row_bytes: int, max_chunk: int) -> Iterator[tuple[int, int]]:
    """Numbers of rows, and of tokens of a chunk beside them, to have recorded, in order."""
    sizes = warm_up_sizes(max_rows, row_bytes)
    yield from ((num_rows, 0) for num_rows in sizes)
    chunks = [size for size in ALL_JOINT_SIZES if size <= max_chunk]
    yield from ((num_rows, num_chunk) for num_rows in sizes for num_chunk in chunks)


@dataclass(frozen=True, slots=True)
class WarmUpStep:
    """One forward of a warm-up. `starts`: where each row begins, those of the chunk, on a slot of its own, last."""

    num_rows: int
    num_chunk: int
    starts: list[int]


def warm_up_steps(num_rows: int, num_chunk: int) -> Iterator[WarmUpStep]:
    """What it takes to have one kind recorded. Rows begin elsewhere each time, since nothing may depend on that."""
    for step in range(NUM_WARM_UP_STEPS):
        rows = [min(step, 1) + (i % 2 if step == NUM_WARM_UP_STEPS - 1 else 0) for i in range(num_rows)]
        chunk = range(step * num_chunk, (step + 1) * num_chunk)
        yield WarmUpStep(num_rows, num_chunk, [*rows, *chunk])


def _current(context: SlotContext) -> contextlib.AbstractContextManager[None]:
    return context.rows.as_current() if context.rows is not None else contextlib.nullcontext()
