"""Writes down what one forward does: every torch operation and every call of our own machine code, in order.

Two forwards of the same kind must leave equal tapes before anything is made of them (program.py): a tape holds what
the model's Python code decided, and only what it decides every time may be left out later. Knows no models and no
slots. Machine code announces itself through `recording`. Used by replay.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _python_dispatch

# Reading values into Python, shapes that depend on values, random numbers: Python code may go another way next time.
_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded}
# What `tolist` and `numpy` leave as their only trace; and what is made of several operators, and carries no tag.
_READS = {"aten::resolve_conj", "aten::resolve_neg", "aten::tensor_split"}
_COUNTS = (
    torch.ops.aten.where.default,
    *(getattr(torch.ops.aten.repeat_interleave, n) for n in ("self_Tensor", "Tensor")),
)
# Constants that a forward makes anew each time are compared by value, up to this size.
_MAX_COMPARED = 1 << 12

_Mode: Any = _python_dispatch.TorchDispatchMode  # untyped
# Makes, from the tensors that a call reads and those that it writes, the same call for good: addresses are fixed.
Bind = Callable[..., Callable[[], object]]

_active = threading.local()


def recording() -> Tape | None:
    """The tape of this thread, if one is running and no machine code is at work."""
    tape: Tape | None = getattr(_active, "tape", None)
    return None if tape is None or tape.is_paused else tape


def refuse(reason: str) -> None:
    """If a tape is running, what happens now cannot be repeated; the forward goes on, the tape ends."""
    tape: Tape | None = getattr(_active, "tape", None)
    if tape is not None:
        tape.reason = tape.reason or reason


@dataclass(frozen=True, slots=True)
class Ref:
    """Stands for a tensor of the forward, in arguments."""

    number: int


@dataclass(frozen=True, slots=True)
class Step:
    """One call.

    Attributes:
        run: torch's operator, or a Bind.
        args: with a Ref for every tensor; a Bind gets them all and then the tensors it writes.
        outs: numbers of the tensors that it returned or wrote.
        reads: numbers of the tensors among its arguments.
        changes: numbers of those of them that it changes.
    """

    run: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outs: tuple[int, ...]
    reads: tuple[int, ...]
    changes: tuple[int, ...] = ()

    @property
    def is_native(self) -> bool:
        """Whether this is our own machine code."""
        return not isinstance(self.run, torch._ops.OpOverload)


def swap(kind: type, change: Callable[[Any], Any], value: Any) -> Any:
    """`value`, an argument of torch's operators, with everything of `kind` in it changed.

    torch's own tree_map knows many more containers and takes several times as long: a recording is a slow step.
    """
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, (tuple, list)):
        return type(value)([swap(kind, change, v) for v in value])
    if isinstance(value, dict):
        return {k: swap(kind, change, v) for k, v in value.items()}
    return value


def _reads_values(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether Python code, or a shape, may depend on the values that the operator reads."""
    if func is torch.ops.aten.index.Tensor:  # the shape does if a mask is among the indices
        return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    if func is torch.ops.aten.dropout.default and not args[2]:  # only in training
        return False
    return not _TAGS.isdisjoint(func.tags) or func._schema.name in _READS or func in _COUNTS


def _reshapes_in_place(func: Any) -> bool:
    """Whether the operator changes a tensor object, not what lies in its memory: a second time would be wrong."""
    return torch.Tag.inplace_view in func.tags and func is not torch.ops.aten.detach_.default


def _changes(schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    values = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
    changed: list[int] = []
    for argument in schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            swap(Ref, lambda ref: changed.append(ref.number), values.get(argument.name))
    return tuple(changed)


class Tape(_Mode):  # type: ignore[misc]
    """The steps of one forward. `reason` is empty, or says why the forward cannot be repeated without its Python code.

    Attributes:
        tensors: by number; the inputs are the first. Kept, so that no address is used twice.
        constants: numbers of tensors that were there before: parameters, states, and whatever Python code made.
    """

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self.tensors: list[torch.Tensor] = []
        self.constants: list[int] = []
        self.num_inputs = len(inputs)
        self.reason = ""
        self.is_paused = False
        self._numbers: dict[int, int] = {}
        for tensor in inputs:
            self._add(tensor)

    def __enter__(self) -> Tape:
        _active.tape = self
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        _active.tape = None
        super().__exit__(*exception)

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not self.is_paused and not self.reason:
            self._note(func, args, kwargs, out)
        return out

    @contextmanager
    def native(self, bind: Bind, reads: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        """Around a call of machine code; the caller puts into the list what it wrote, all of it in new memory."""
        outs: list[torch.Tensor] = []
        self.is_paused = True
        try:
            yield outs
        finally:
            self.is_paused = False
        if not self.reason:
            args = tuple(self._ref(t) for t in reads)
            self.steps.append(Step(bind, args, {}, tuple(self._add(t) for t in outs), tuple(r.number for r in args)))

    def number(self, tensor: torch.Tensor) -> int | None:
        """Of a tensor of the forward."""
        return self._numbers.get(id(tensor))

    def summary(self) -> Summary:
        """What another tape is compared with; holds on to no memory but that of constants."""
        constants = [(number, self.tensors[number]) for number in self.constants]
        return Summary(self.steps, [_kind(t) for t in self.tensors], constants)

    def _note(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        outs = out if isinstance(out, (tuple, list)) else (out,)
        if not all(isinstance(o, torch.Tensor) for o in outs) or _reads_values(func, args):
            self.reason = f"{func} depends on values"
            return
        if _reshapes_in_place(func):
            self.reason = f"{func} changes a tensor's shape in place"
            return
        reads: list[int] = []

        def ref(tensor: torch.Tensor) -> Ref:
            found = self._ref(tensor)
            reads.append(found.number)
            return found

        args, kwargs = swap(torch.Tensor, ref, args), swap(torch.Tensor, ref, kwargs)
        changes = _changes(func._schema, args, kwargs) if func._schema.is_mutable else ()
        self.steps.append(Step(func, args, kwargs, tuple(self._add(o) for o in outs), tuple(reads), changes))

    def _ref(self, tensor: torch.Tensor) -> Ref:
        number = self._numbers.get(id(tensor))
        if number is None:
            number = self._add(tensor)
            self.constants.append(number)
        return Ref(number)

    def _add(self, tensor: torch.Tensor) -> int:
        number = self._numbers.get(id(tensor))
        if number is None:
            number = self._numbers[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
        return number


@dataclass(frozen=True, slots=True)
class Summary:
    """A tape without the tensors that the forward made."""

    steps: list[Step]
    kinds: list[tuple[Any, ...]]
    constants: list[tuple[int, torch.Tensor]]

    def difference(self, tape: Tape) -> str:
        """Empty when that forward did the same on tensors of the same kind; else the first difference."""
        if len(self.steps) != len(tape.steps) or len(self.kinds) != len(tape.tensors):
            return f"{len(self.steps)} operations, then {len(tape.steps)}"
        for own, its in zip(self.steps, tape.steps, strict=True):
            if own != its:
                return f"{_name(own)} was called differently"
        for own_kind, tensor in zip(self.kinds, tape.tensors, strict=True):
            if own_kind != _kind(tensor):
                return f"a tensor of {tuple(own_kind[0])}, then of {tuple(tensor.shape)}"
        for number, constant in self.constants:
            if not _same(constant, tape.tensors[number]):
                return f"a constant of {tuple(constant.shape)} changed"
        return ""


def _name(step: Step) -> str:
    return getattr(step.run, "__qualname__", None) or str(step.run)


def _kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    layout = (tensor.stride(), tensor.storage_offset()) if type(tensor) is torch.Tensor else ()
    if tensor.is_conj() or tensor.is_neg():  # a bit beside the memory
        layout = (*layout, "lazy")
    return (tensor.shape, tensor.dtype, tensor.device, *layout)


def _same(own: torch.Tensor, its: torch.Tensor) -> bool:
    if own is its:
        return True
    is_small = own.numel() <= _MAX_COMPARED and type(own) is torch.Tensor
    return is_small and own.shape == its.shape and own.dtype == its.dtype and torch.equal(own, its)
