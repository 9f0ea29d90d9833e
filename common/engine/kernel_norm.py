"""Root-mean-square normalisation in one native call instead of six torch operations, on the CPU in float32.

A decode step has two or more norms per layer over a single row: torch's time for them is nearly all overhead. Which
modules are such norms is found by trying them, not by their names. Called by the runner's `load`.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from common.engine.kernel_blocks import fma, load, store
from common.engine.kernel_llvm import FMA, LANES, VECTOR, Code, Once, add, compile_module, splat, tree
from common.engine.tape import recording

Norm = Callable[[int, int, int, int, int, float], None]
# Relative difference to the module's own result that other orders of summation explain.
TOLERANCE = 1e-5


def _compile() -> tuple[Norm, object]:
    engine = compile_module(source)
    signature = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 5, ctypes.c_float)
    return signature(engine.get_function_address("rms_norm")), engine


# f(x, weight, out, num_rows, width, eps) and what owns its code. Addresses; `width` is a multiple of LANES.
rms_norm = Once(_compile, "norm kernels are not available, torch computes them")


def source(_parallel: int) -> str:
    """The LLVM module."""
    code = Code()
    x, weight, out = (code.pointer(name) for name in ("%x", "%weight", "%out"))
    count = code.value("sitofp i64 %width to float")

    def row(number: str) -> None:
        first = code.number("mul", number, "%width")
        own, target = code.at(x, first, "float"), code.at(out, first, "float")

        def square(i: str, sums: list[str]) -> list[str]:
            value = load(code, own, i)
            return [fma(code, value, value, sums[0])]

        _, total = code.loop("%width", square, step=LANES, carried=[(VECTOR, "zeroinitializer")])
        mean = code.value(f"fdiv float {tree(code, total, add)}, {count}")
        root = code.value(f"call float @llvm.sqrt.f32(float {code.value(f'fadd float {mean}, %eps')})")
        scale = splat(code, code.value(f"fdiv float 1.0, {root}"))

        def apply(i: str) -> None:
            scaled = code.value(f"fmul {VECTOR} {load(code, own, i)}, {scale}")
            store(code, code.value(f"fmul {VECTOR} {scaled}, {load(code, weight, i)}"), target, i)

        code.each("%width", apply, step=LANES)

    code.each("%num_rows", row)
    code.do("ret void")
    arguments = "i64 %x, i64 %weight, i64 %out, i64 %num_rows, i64 %width, float %eps"
    declarations = [
        FMA,
        "declare float @llvm.sqrt.f32(float)",
    ]
    return "\n".join([*declarations, code.function(f"void @rms_norm({arguments}) nounwind")])


def accelerate_norms(model: nn.Module) -> int:
    """Give every norm that is one a native forward, in place; returns how many."""
    made = rms_norm()
    if made is None:
        return 0
    num = 0
    for module in model.modules():
        weight = _effective_weight(module)
        if weight is not None:
            setattr(module, "forward", _native(made[0], module, weight))  # noqa: B010 - mypy forbids the assignment
            num += 1
    return num


def _eps(module: Any) -> float | None:
    for name in ("variance_epsilon", "eps"):
        value = getattr(module, name, None)
        if isinstance(value, float):
            return value
    return None


def _effective_weight(module: nn.Module) -> torch.Tensor | None:
    """What the module multiplies normalised rows with, if it is a root-mean-square norm that we can compute."""
    parameters = dict(module.named_parameters(recurse=False))
    weight, eps = parameters.get("weight"), _eps(module)
    if len(parameters) != 1 or weight is None or eps is None or any(module.children()) or any(module.buffers()):
        return None
    if weight.dim() != 1 or weight.dtype != torch.float32 or not weight.is_cpu or weight.numel() % LANES:
        return None
    if len(inspect.signature(module.forward).parameters) != 1:
        return None  # a gate, or who knows what
    x = torch.linspace(-2.0, 3.0, 2 * weight.numel()).view(1, 2, -1) ** 3
    with torch.inference_mode():
        own = module(x)
    plain = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    for candidate in (weight.detach(), weight.detach() + 1.0):
        expected = plain * candidate
        if own.shape == x.shape and (own - expected).abs().max() <= TOLERANCE * expected.abs().max():
            return candidate.contiguous()
    return None


def _native(run: Norm, module: nn.Module, weight: torch.Tensor) -> Callable[..., torch.Tensor]:
    own, eps, width = module.forward, _eps(module) or 0.0, weight.numel()

    def forward(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The module's forward; whatever is not a plain float32 tensor goes its own way."""
        if args or kwargs or x.dtype is not torch.float32 or not x.is_contiguous() or x.requires_grad or not x.is_cpu:
            return own(x, *args, **kwargs)  # type: ignore[no-any-return]
        if x.shape[-1] != width:
            raise ValueError(f"x has {x.shape[-1]} columns, the norm has {width}")
        tape = recording()
        if tape is None:
            out = torch.empty_like(x)
            bind(x, out)()
            return out
        with tape.native(bind, [x]) as outs:
            outs.append(out := torch.empty_like(x))
            bind(x, out)()
        return out

    def bind(x: torch.Tensor, out: torch.Tensor) -> Callable[[], object]:
        return functools.partial(run, x.data_ptr(), at, out.data_ptr(), x.numel() // width, width, eps)

    at = weight.data_ptr()
    setattr(bind, "weight", weight)  # noqa: B010 - keeps it as long as its address
    return forward
