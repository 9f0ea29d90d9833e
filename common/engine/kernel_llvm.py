"""What our kernels share: LLVM text written by Python, made into machine code for this CPU, run on torch's threads.

`Code` writes one function; `compile_module` turns a module's text into code; `Once` keeps what was made, or why it
could not be, for the process. Knows no kernels. Used by kernel_code.py and kernel_attention.py.
"""

from __future__ import annotations

import ctypes
import logging
import platform
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch

log = logging.getLogger(__name__)

# Floats of a vector register. torch's own choice for this CPU (ATEN_CPU_CAPABILITY overrides both).
LANES = 16 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 8
VECTOR = f"<{LANES} x float>"
FMA = f"declare {VECTOR} @llvm.fma.v{LANES}f32({VECTOR}, {VECTOR}, {VECTOR})"
# Below so many multiplications, waking a second thread costs more than it saves.
MIN_PARALLEL = 1 << 17
_FEATURES = {8: ("avx2", "fma"), 16: ("avx512f", "avx512bw", "avx512dq", "avx512vl")}
T = TypeVar("T")


class Once(Generic[T]):
    """Makes something at the first call; None, said once in the log, if that fails."""

    def __init__(self, make: Callable[[], T], failure: str) -> None:
        """`failure`: what to say in the log, before the reason."""
        self._make, self._failure, self._lock = make, failure, threading.Lock()
        self._made: T | None = None
        self.reason = ""

    def __call__(self) -> T | None:
        with self._lock:
            if self._made is None and not self.reason:
                try:
                    self._made = self._make()
                except (ImportError, OSError, RuntimeError, AttributeError, ValueError) as error:
                    log.info("%s: %s", self._failure, error)
                    self.reason = str(error) or type(error).__name__
            return self._made


def compile_module(source: Callable[[int], str]) -> Any:
    """An LLVM execution engine with the module `source(address of GOMP_parallel, or 0 where there is none)`.

    Raises:
        ImportError: llvmlite is missing.
        RuntimeError: the CPU lacks the instructions, or LLVM refuses the module.
    """
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    features = llvm.get_host_cpu_features()
    machine_name = platform.machine().lower()
    if sys.byteorder != "little" or not (
        machine_name in ("aarch64", "arm64") or all(features.get(name) for name in _FEATURES[LANES])
    ):
        raise RuntimeError(f"{machine_name} without {', '.join(_FEATURES[LANES])}")
    # torch's own OpenMP threads: a second pool would fight with them for the cores.
    run = getattr(ctypes.CDLL(None), "GOMP_parallel", None)
    parallel = (ctypes.cast(run, ctypes.c_void_p).value or 0) if run is not None else 0
    if not parallel:
        log.info("torch has no OpenMP of GNU's kind: kernels run on one thread")
    target = llvm.Target.from_default_triple()
    machine = target.create_target_machine(cpu=llvm.get_host_cpu_name(), features=features.flatten(), opt=2)
    module = llvm.parse_assembly(source(parallel))
    module.verify()
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    return engine


class Code:
    """Lines of one function, with fresh names for intermediate values."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def value(self, expression: str) -> str:
        name = f"%v{len(self.lines)}"
        self.lines.append(f"  {name} = {expression}")
        return name

    def do(self, *lines: str) -> None:
        self.lines += [line if line.endswith(":") else "  " + line for line in lines]

    def at(self, base: str, index: str | int, kind: str = "i8") -> str:
        """Address of element `index` of an array of `kind`."""
        return self.value(f"getelementptr {kind}, ptr {base}, i64 {index}")

    def load(self, base: str, index: str | int, kind: str = "i64") -> str:
        """Element `index` of an array of `kind`."""
        return self.value(f"load {kind}, ptr {self.at(base, index, kind)}")

    def slots(self, base: str, names: Sequence[str]) -> dict[str, str]:
        """All int64 slots of a record."""
        return {name: self.load(base, i) for i, name in enumerate(names)}

    def pointer(self, number: str) -> str:
        return self.value(f"inttoptr i64 {number} to ptr")

    def number(self, operation: str, a: str, b: str | int) -> str:
        """An operation on two i64."""
        return self.value(f"{operation} i64 {a}, {b}")

    def loop(
        self,
        stop: str,
        body: Callable[[str, list[str]], Sequence[str]],
        *,
        start: str = "0",
        step: int = 1,
        carried: Sequence[tuple[str, str]] = (),
    ) -> list[str]:
        """While index < stop: `body(index, values)` gives the next values of what is carried, (type, first) each.

        Returns the index after the last step, then the last values.
        """
        name = f"loop{len(self.lines)}"
        self.do(f"br label %{name}.before", f"{name}.before:", f"br label %{name}", f"{name}:")
        variables = [(f"%{name}.at", "i64", start)]
        variables += [(f"%{name}.{i}", kind, first) for i, (kind, first) in enumerate(carried)]
        place = len(self.lines)
        self.lines += [""] * len(variables)
        self.do(f"%{name}.more = icmp slt i64 %{name}.at, {stop}")
        self.do(f"br i1 %{name}.more, label %{name}.body, label %{name}.end", f"{name}.body:")
        fresh = body(variables[0][0], [v[0] for v in variables[1:]])
        self.do(f"br label %{name}.last", f"{name}.last:", f"%{name}.next = add i64 %{name}.at, {step}")
        self.do(f"br label %{name}", f"{name}.end:")
        for i, ((variable, kind, first), after) in enumerate(zip(variables, [f"%{name}.next", *fresh], strict=True)):
            self.lines[place + i] = f"  {variable} = phi {kind} [{first}, %{name}.before], [{after}, %{name}.last]"
        return [v[0] for v in variables]

    def each(self, stop: str, work: Callable[[str], object], *, start: str = "0", step: int = 1) -> str:
        """A loop that carries nothing; returns the index after the last step."""

        def body(index: str, _values: list[str]) -> list[str]:
            work(index)
            return []

        return self.loop(stop, body, start=start, step=step)[0]

    def function(self, head: str) -> str:
        return "\n".join([f"define {head} {{", *self.lines, "}"])


def splat(code: Code, scalar: str) -> str:
    """A float in all lanes."""
    first = code.value(f"insertelement {VECTOR} poison, float {scalar}, i32 0")
    return code.value(f"shufflevector {VECTOR} {first}, {VECTOR} poison, <{LANES} x i32> zeroinitializer")


def shuffle(code: Code, low: str, high: str, lanes: Sequence[int], width: int = LANES) -> str:
    """Lanes of two vectors of `width` floats, numbered through."""
    numbers = ", ".join(f"i32 {lane}" for lane in lanes)
    kind = f"<{width} x float>"
    return code.value(f"shufflevector {kind} {low}, {kind} {high}, <{len(lanes)} x i32> <{numbers}>")


def add(code: Code, a: str, b: str, lanes: int = LANES) -> str:
    """The sum of two vectors."""
    return code.value(f"fadd <{lanes} x float> {a}, {b}")


def tree(code: Code, vector: str, combine: Callable[[Code, str, str, int], str]) -> str:
    """All lanes combined into one float, halves with halves."""
    lanes = LANES // 2
    while lanes:
        low, high = (shuffle(code, vector, "poison", range(i, i + lanes), 2 * lanes) for i in (0, lanes))
        vector = combine(code, low, high, lanes)
        lanes //= 2
    return code.value(f"extractelement <1 x float> {vector}, i32 0")


# How `totals` adds upper lanes to lower ones: the lower, and how far above them the upper are. The first two steps make
# one vector of two.
_FOLDS: dict[int, tuple[tuple[tuple[int, ...], int], ...]] = {
    8: (((0, 1, 2, 3, 8, 9, 10, 11), 4), ((0, 1, 8, 9, 4, 5, 12, 13), 2), ((0, 4, 2, 6), 1)),
    16: (
        ((*range(8), *range(16, 24)), 8),
        ((*range(4), *range(8, 12), *range(16, 20), *range(24, 28)), 4),
        ((0, 1, 4, 5, 8, 9, 12, 13), 2),
        ((0, 2, 4, 6), 1),
    ),
}


def totals(code: Code, sums: Sequence[str]) -> str:
    """The sums of four vectors' lanes, added in the order that `tree` has, as one <4 x float>."""
    a, b, c, d = sums
    first, second, *others = _FOLDS[LANES]
    vector = _fold(code, _fold(code, a, b, first), _fold(code, c, d, first), second)
    size = LANES
    for fold in others:
        vector, size = _fold(code, vector, "poison", fold, size), len(fold[0])
    return vector


def _fold(code: Code, a: str, b: str, fold: tuple[tuple[int, ...], int], size: int = LANES) -> str:
    lanes, above = fold
    low, high = shuffle(code, a, b, lanes, size), shuffle(code, a, b, [i + above for i in lanes], size)
    return add(code, low, high, len(lanes))


def entry_code(code: Code, worker: str, call: str, parallel: int) -> None:
    """The end of an entry point: `worker` runs here or on %threads threads, each with the address of the call."""
    code.do(
        f"%alone = icmp slt i32 %threads, {2 if parallel else 1 << 30}",
        "br i1 %alone, label %serial, label %parallel",
        "serial:",
    )
    code.do(f"call void @{worker}(ptr {call})", "ret void", "parallel:")
    code.do(f"%run = inttoptr i64 {parallel} to ptr")
    code.do(f"call void %run(ptr @{worker}, ptr {call}, i32 %threads, i32 0)", "ret void")
