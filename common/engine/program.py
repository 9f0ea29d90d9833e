"""A forward as a flat list of calls on memory that stays where it is: a tape without the Python code that made it.

Views cost nothing, since the memory does not move; what depends on weights alone is computed once; the rest writes
into one arena in which a tensor's place is used again after its last use. Built from a tape (tape.py); knows no
models. Used by replay.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from common.engine.tape import Ref, Step, Tape, swap
from common.errors import EngineError

ALIGNMENT = 64
# Operators that only copy.
_COPIES = {"aten::to", "aten::_to_copy", "aten::clone", "aten::contiguous", "aten::reshape", "aten::_unsafe_view"}
_EMPTY = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty"}

Call = Callable[[], object]


class NotReplayable(Exception):
    """The tape cannot be made into a program; says why."""


class Program:
    """Repeats one forward. Not for several threads at once."""

    def __init__(self, tape: Tape, output: torch.Tensor, arena: Arena) -> None:
        """`output`: of the recorded forward, which is repeated once as its calls are made: it changes states again.

        Programs with one arena run one at a time.

        Raises:
            NotReplayable: with the reason.
        """
        number = tape.number(output)
        if tape.reason or number is None:
            raise NotReplayable(tape.reason or "the output comes from outside the forward")
        memory = _Memory(tape, number, arena)
        tensors = memory.tensors
        self.inputs = tensors[: tape.num_inputs]
        self.output = tensors[number]
        self.num_bytes = memory.num_bytes
        self._tensors = tensors  # some calls know addresses only
        for own, given in zip(self.inputs, tape.tensors, strict=False):
            own.copy_(given)
        self._calls = [call for i in memory.needed if (call := _call(tape.steps[i], tensors, memory)) is not None]

    def __len__(self) -> int:
        return len(self._calls)

    def run(self, *inputs: torch.Tensor) -> torch.Tensor:
        """The output for these inputs, of the recorded shapes; valid until the next run."""
        for own, given in zip(self.inputs, inputs, strict=True):
            own.copy_(given)
        for call in self._calls:
            call()
        return self.output


class Arena:
    """Memory that programs share; one that needs more than there is gets, and leaves behind, a larger one."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> torch.Tensor:
        """At least `num_bytes`, uint8."""
        if self.memory.numel() < num_bytes:
            self.memory = torch.empty(max(num_bytes, 2 * self.memory.numel()), dtype=torch.uint8)
        return self.memory


class _Memory:
    """Decides where each tensor of the tape lives, and which steps have to run each time."""

    def __init__(self, tape: Tape, output: int, arena: Arena) -> None:
        self._tape = tape
        self._storage = _storages(tape.tensors)
        known = {self._storage[n] for n in (*range(tape.num_inputs), *tape.constants)}
        self._changed = {self._storage[n] for step in tape.steps for n in step.changes}
        self._fixed = {self._storage[n] for n in tape.constants}  # values that no step changes
        self._fixed -= self._changed | {self._storage[n] for n in range(tape.num_inputs)}
        self.needed: list[int] = []
        self._life: dict[int, list[int]] = {}  # storage: first and last step
        for i, step in enumerate(tape.steps):
            self._visit(i, step, known)
        self._extend(self._storage[output], len(tape.steps))
        offsets, self.num_bytes = _arrange(self._life, self._sizes())
        self._arena = arena.take(self.num_bytes)
        inputs = {self._storage[n]: torch.empty_like(tape.tensors[n]) for n in range(tape.num_inputs)}
        self.tensors = [self._place(n, offsets, inputs) for n in range(len(tape.tensors))]

    def is_new(self, step: Step) -> bool:
        """Whether the step's results lie in memory of their own, not in that of its arguments."""
        read = {self._storage[n] for n in step.reads}
        return all(self._storage[n] not in read for n in step.outs)

    def _visit(self, i: int, step: Step, known: set[int]) -> None:
        made = {self._storage[n] for n in step.outs} - known
        known |= made
        reads = {self._storage[n] for n in step.reads}
        if self._is_constant(step, made, reads):
            self._fixed |= made
            return
        for storage in made:
            self._life[storage] = [i, i]
        for storage in reads | {self._storage[n] for n in step.outs}:
            self._extend(storage, i)
        if made or step.changes:
            self.needed.append(i)

    def _is_constant(self, step: Step, made: set[int], reads: set[int]) -> bool:
        """Whether the step gives the same each time: it reads fixed values, and nobody changes what it made."""
        if step.is_native or step.run._schema.name in _EMPTY or step.run._schema.is_mutable:
            return False
        return reads <= self._fixed and made.isdisjoint(self._changed)

    def _extend(self, storage: int, step: int) -> None:
        if storage in self._life:
            self._life[storage][1] = step

    def _sizes(self) -> dict[int, int]:
        sizes: dict[int, int] = {}
        for number, tensor in enumerate(self._tape.tensors):
            if self._storage[number] in self._life:
                sizes[self._storage[number]] = tensor.untyped_storage().nbytes()
        return sizes

    def _place(self, number: int, offsets: dict[int, int], inputs: dict[int, torch.Tensor]) -> torch.Tensor:
        tensor, storage, start = self._tape.tensors[number], self._storage[number], 0
        if storage in offsets:
            memory, start = self._arena.untyped_storage(), offsets[storage] // tensor.element_size()
        elif storage in inputs:
            memory = inputs[storage].untyped_storage()
        else:
            return tensor
        empty = torch.empty(0, dtype=tensor.dtype)
        return empty.set_(memory, start + tensor.storage_offset(), tensor.shape, tensor.stride())


def _storages(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Which tensors share memory: the same number for those that do."""
    numbers: dict[tuple[str, int], int] = {}
    found = []
    for tensor in tensors:
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
            raise NotReplayable("a tensor is not a plain one on the CPU")
        # Wrappers have no memory.
        address = tensor.untyped_storage().data_ptr() if type(tensor) in (torch.Tensor, torch.nn.Parameter) else 0
        key = ("memory", address) if address else ("object", id(tensor))
        found.append(numbers.setdefault(key, len(numbers)))
    return found


def _arrange(life: dict[int, list[int]], sizes: dict[int, int]) -> tuple[dict[int, int], int]:
    """Offsets in an arena such that storages that live at the same step do not overlap, and the arena's size."""
    offsets: dict[int, int] = {}
    placed: list[tuple[int, int, int]] = []  # offset, stop, last step; of those still alive, by offset
    total = 0
    for storage, (first, last) in sorted(life.items(), key=lambda item: item[1][0]):
        placed = [p for p in placed if p[2] >= first]
        size, offset, at = -(-max(sizes[storage], 1) // ALIGNMENT) * ALIGNMENT, 0, 0
        for at, (start, stop, _) in enumerate(placed):  # noqa: B007 - the first gap that is large enough
            if start - offset >= size:
                break
            offset = stop
        else:
            at = len(placed)
        placed.insert(at, (offset, offset + size, last))
        offsets[storage], total = offset, max(total, offset + size)
    return offsets, total


def _call(step: Step, tensors: list[torch.Tensor], memory: _Memory) -> Call | None:
    """The step on its tensors for good, done once; None when there is nothing to do."""
    args, kwargs = swap(Ref, lambda ref: tensors[ref.number], (step.args, step.kwargs))
    outs = [tensors[n] for n in step.outs]
    call: Call
    if step.is_native:
        call = step.run(*args, *outs)
    elif step.run._schema.is_mutable:
        method = getattr(torch.Tensor, step.run._schema.name.removeprefix("aten::"), None)
        call = functools.partial(step.run if method is None or kwargs else method, *args, **kwargs)
    elif not memory.is_new(step):
        raise NotReplayable(f"{step.run} returns part of its arguments and more")
    elif step.run._schema.name in _EMPTY:
        return None
    elif step.run._schema.name in _COPIES:
        call = _copy(args[0], outs[0])
    else:
        return _into(step.run, args, kwargs, outs)
    call()
    return call


def _copy(source: torch.Tensor, target: torch.Tensor) -> Call:
    if source.shape != target.shape:
        target = target.view(source.shape)  # a copy that changes the shape is contiguous
    return functools.partial(target.copy_, source)


def _into(run: Any, args: Any, kwargs: dict[str, Any], outs: list[torch.Tensor]) -> Call:
    """The operator writing to `outs`: by its own `out` argument where torch has a quick function for it."""
    name = run._schema.name.removeprefix("aten::")
    placed = {k: v for k, v in kwargs.items() if k not in ("device", "layout", "pin_memory")}
    out = outs[0] if len(outs) == 1 else tuple(outs)
    before = [(t.data_ptr(), t.shape) for t in outs]
    for home in (torch, torch._C._nn):
        function = getattr(home, name, None)
        if function is None:
            continue
        try:
            function(*args, **placed, out=out)
        except (TypeError, RuntimeError):
            continue
        if [(t.data_ptr(), t.shape) for t in outs] != before:
            raise NotReplayable(f"{run} did not keep to the memory it was given")
        return functools.partial(function, *args, **placed, out=out)

    def call() -> None:
        found = run(*args, **kwargs)
        for target, value in zip(outs, (found,) if len(outs) == 1 else found, strict=True):
            if value.shape != target.shape:
                raise EngineError(f"{run} gave {tuple(value.shape)} where it gave {tuple(target.shape)} before")
            target.copy_(value)

    call()
    return call
