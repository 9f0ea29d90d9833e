"""Machine code for products of few rows with a large matrix, made with LLVM at run time for this CPU.

One function per weight format: y[M, N] = x[M, K] W[N, K]^T + bias. W is packed in tiles of ROWS rows, each a run of
chunks that hold STEPS[format] weights of every row: one stream that is read once, whatever M. Each sum adds chunk
after chunk in the same order with fused multiply-adds, so a result depends neither on M nor on the thread that made it,
and nothing lets the compiler assume away NaN or infinity. Knows addresses, no tensors. Used by kernel_weights.py.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

from common.engine.kernel_llvm import (
    FMA,
    LANES,
    VECTOR,
    Code,
    Once,
    add,
    compile_module,
    entry_code,
    splat,
    totals,
    tree,
)

# Rows of W in a tile, and rows of x that one pass over it serves: ROWS * MAX_X accumulators, ROWS weights and one x
# fill the registers, which are 16, or 32 of 16 lanes.
ROWS, MAX_X = (3, 4) if LANES == 8 else (4, 6)
# From so many rows of x on, a block is unpacked to float32 once instead of in every pass.
UNPACK_FROM = {"float32": 1 << 62} | (
    {"bfloat16": 32, "int8": 16, "int4": 6} if LANES == 8 else {"bfloat16": 96, "int8": 96, "int4": 48}
)
PREFETCH_BYTES = 4096  # how far ahead in the tile's stream

# Weights of each row in a chunk, and the bytes of a chunk.
STEPS = {"float32": LANES, "bfloat16": 2 * LANES, "int8": 32, "int4": 32}
LINE = 4 * LANES  # bytes of a vector
CHUNK_BYTES = {"float32": ROWS * LINE, "bfloat16": ROWS * LINE, "int8": ROWS * (4 + 32), "int4": ROWS * (4 + 4 + 16)}
INTS, BYTES = f"<{LANES} x i32>", f"<{LANES} x i8>"

# Slots (int64) of a plan: the same for every call; then SEGMENT slots per matrix.
PLAN = ("num_blocks", "block_rows", "num_chunks", "scratch_bytes")
SEGMENT = ("weights", "bias", "num_rows", "num_blocks")
# Slots of what one call adds; the first two are counters that the threads take blocks and scratch memory by.
_CALL = ("next_block", "next_scratch", "plan", "x", "x_stride", "num_x", "out", "scratch")

_TILE_ARGS = (
    "ptr noalias {w}, i64 {chunks}, ptr {x}, i64 {x_stride}, ptr {bias}, ptr noalias {out}, i64 {n}, i64 {rows}"
)

Entry = Callable[[int, int, int, int, int, int, int], None]


@dataclass(frozen=True, slots=True)
class Kernels:
    """Entry points by weight format: f(plan, x, x_stride, num_x, out, scratch, threads), addresses and counts.

    `x_stride` counts floats. `scratch` has `scratch_bytes` of the plan per thread, needed from UNPACK_FROM[format] on.
    `out` takes each segment's [num_x, num_rows] after the other. Calls may run at once on any threads.
    """

    entries: dict[str, Entry]
    engine: object  # owns the code


def reason() -> str:
    """Why `kernels` returned None, or an empty string."""
    return kernels.reason


def _compile() -> Kernels:
    engine = compile_module(source)
    signature = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 6, ctypes.c_int32)
    return Kernels({name: signature(engine.get_function_address(f"product_{name}")) for name in STEPS}, engine)


# The kernels of this process, compiled at the first call; None, said once in the log, if that fails.
kernels = Once(_compile, "matrix kernels are not available, torch computes all products")


def source(parallel: int) -> str:
    """The LLVM module; `parallel` is the address of GOMP_parallel, or 0 where there is none."""
    parts = [
        FMA,
        "declare i64 @llvm.umin.i64(i64, i64)",
        "declare void @llvm.prefetch.p0(ptr, i32, i32, i32)",
    ]
    for name in STEPS:
        parts += [_tile(name, m) for m in range(1, MAX_X + 1)]
        parts += [_block(name), _unpack(name), _worker(name), _entry(name, parallel)]
    return "\n".join(parts)


def _weights(code: Code, name: str, chunk: str, row: int, part: int) -> str:
    """A vector of float32 weights of a chunk: those of `row` that meet x[LANES * part :] of the chunk's step."""
    if name == "float32":
        return code.value(f"load {VECTOR}, ptr {code.at(chunk, row * LINE)}, align 4")
    if name == "bfloat16":
        # Weight i and weight LANES + i share a 32-bit word; a bfloat16 is the upper half of a float32.
        pairs = code.value(f"load {INTS}, ptr {code.at(chunk, row * LINE)}, align 4")
        bits = code.value(f"and {INTS} {pairs}, splat (i32 -65536)" if part else f"shl {INTS} {pairs}, splat (i32 16)")
        return code.value(f"bitcast {INTS} {bits} to {VECTOR}")
    if name == "int8":
        small = code.value(f"load {BYTES}, ptr {code.at(chunk, ROWS * 4 + row * 32 + part * LANES)}, align 1")
        wide = code.value(f"sext {BYTES} {small} to {INTS}")
        level = code.value(f"sitofp {INTS} {wide} to {VECTOR}")
        return code.value(f"fmul {VECTOR} {level}, {_spread(code, code.at(chunk, row * 4))}")
    # Byte i of LANES holds weights i and LANES + i.
    small = code.value(f"load {BYTES}, ptr {code.at(chunk, ROWS * 8 + row * 16 + part // 2 * LANES)}, align 1")
    wide = code.value(f"zext {BYTES} {small} to {INTS}")
    four = code.value(f"lshr {INTS} {wide}, splat (i32 4)" if part % 2 else f"and {INTS} {wide}, splat (i32 15)")
    level = code.value(f"sitofp {INTS} {four} to {VECTOR}")
    # A 4-bit level times a scale of 11 bits is exact, so this rounds once, as a fused operation would, but needs one
    # register less.
    product = code.value(f"fmul {VECTOR} {level}, {_spread(code, code.at(chunk, row * 4))}")
    return code.value(f"fadd {VECTOR} {product}, {_spread(code, code.at(chunk, (ROWS + row) * 4))}")


def _spread(code: Code, address: str) -> str:
    return splat(code, code.value(f"load float, ptr {address}, align 4"))


def _tile(name: str, num_x: int) -> str:
    """One tile of W times `num_x` rows of x; stores the first `rows` of its results."""
    code, step = Code(), STEPS[name]
    sums = [[f"%s{row}_{m}" for m in range(num_x)] for row in range(ROWS)]
    code.do("entry:")
    xs = ["%x"] + [code.at("%x", code.value(f"mul i64 %x_stride, {m}"), "float") for m in range(1, num_x)]
    code.do("br label %loop", "loop:", "%c = phi i64 [0, %entry], [%c.next, %loop]")
    code.do(*(f"{s} = phi {VECTOR} [zeroinitializer, %entry], [{s}.next, %loop]" for row in sums for s in row))
    chunk = code.at("%w", code.value(f"mul i64 %c, {CHUNK_BYTES[name]}"))
    for ahead in range(0, CHUNK_BYTES[name], 64):
        code.do(f"call void @llvm.prefetch.p0(ptr {code.at(chunk, PREFETCH_BYTES + ahead)}, i32 0, i32 3, i32 1)")
    k = code.value(f"mul i64 %c, {step}")
    last = dict(zip((s for row in sums for s in row), (s for row in sums for s in row), strict=True))
    for part in range(step // LANES):
        weights = [_weights(code, name, chunk, row, part) for row in range(ROWS)]
        for m in range(num_x):
            x = code.value(f"load {VECTOR}, ptr {code.at(code.at(xs[m], k, 'float'), part * LANES, 'float')}, align 4")
            for row in range(ROWS):
                s = sums[row][m]
                fresh = f"{s}.next" if part == step // LANES - 1 else f"{s}.{part}"
                terms = ", ".join(f"{VECTOR} {term}" for term in (weights[row], x, last[s]))
                code.do(f"{fresh} = call {VECTOR} @llvm.fma.v{LANES}f32({terms})")
                last[s] = fresh
    code.do("%c.next = add i64 %c, 1", "%more = icmp ult i64 %c.next, %chunks", "br i1 %more, label %loop, label %done")
    code.do("done:")
    _store(code, sums)
    args = _TILE_ARGS.format(**{a: f"%{a}" for a in ("w", "chunks", "x", "x_stride", "bias", "out", "n", "rows")})
    return code.function(f"internal void @tile_{name}_{num_x}({args}) noinline nounwind")


def _store(code: Code, sums: list[list[str]]) -> None:
    """Each row's sums of lanes plus its bias; a whole tile of four rows at once."""
    if ROWS == 4:
        code.do("%whole = icmp uge i64 %rows, 4", "br i1 %whole, label %four, label %some", "four:")
        bias = code.value("load <4 x float>, ptr %bias, align 4")
        for m in range(len(sums[0])):
            total = totals(code, [f"{row[m]}.next" for row in sums])
            place = code.at("%out", code.value(f"mul i64 %n, {m}"), "float")
            code.do(f"store <4 x float> {add(code, total, bias, 4)}, ptr {place}, align 4")
        code.do("br label %end", "some:")
    results = [[tree(code, f"{s}.next", add) for s in row] for row in sums]
    for row, line in enumerate(results):
        if row:
            code.do(
                f"%has{row} = icmp ugt i64 %rows, {row}", f"br i1 %has{row}, label %row{row}, label %end", f"row{row}:"
            )
        bias = code.value(f"load float, ptr {code.at('%bias', row, 'float')}, align 4")
        for m, total in enumerate(line):
            place = code.at(code.at("%out", code.value(f"mul i64 %n, {m}"), "float"), row, "float")
            code.do(f"store float {code.value(f'fadd float {total}, {bias}')}, ptr {place}, align 4")
    code.do("br label %end", "end:", "ret void")


def _block(name: str) -> str:
    """All rows of x, MAX_X at a time or fewer in equal parts, times a block of tiles."""
    code = Code()
    tile_bytes = "%tile_bytes"
    code.do("entry:", f"{tile_bytes} = mul i64 %chunks, {CHUNK_BYTES[name]}", "br label %group", "group:")
    code.do("%m = phi i64 [0, %entry], [%m.next, %group.end]")
    left = code.value("sub i64 %num_x, %m")
    parts = code.value(f"udiv i64 {code.value(f'add i64 {left}, {MAX_X - 1}')}, {MAX_X}")
    rounded = code.value(f"sub i64 {code.value(f'add i64 {left}, {parts}')}, 1")
    size = code.value(f"udiv i64 {rounded}, {parts}")
    x = code.at("%x", code.value("mul i64 %m, %x_stride"), "float")
    out = code.at("%out", code.value("mul i64 %m, %n"), "float")
    cases = " ".join(f"i64 {m}, label %size{m}" for m in range(1, MAX_X))
    code.do(f"switch i64 {size}, label %size{MAX_X} [{cases}]")
    for m in range(1, MAX_X + 1):
        code.do(
            f"size{m}:", f"br label %tile{m}", f"tile{m}:", f"%r{m} = phi i64 [0, %size{m}], [%r{m}.next, %tile{m}]"
        )
        code.do(f"%w{m} = phi ptr [%w, %size{m}], [%w{m}.next, %tile{m}]")
        args = {"w": f"%w{m}", "chunks": "%chunks", "x": x, "x_stride": "%x_stride", "n": "%n"}
        args |= {"bias": code.at("%bias", f"%r{m}", "float"), "out": code.at(out, f"%r{m}", "float")}
        args["rows"] = code.value(f"sub i64 %rows, %r{m}")
        code.do(f"call void @tile_{name}_{m}({_TILE_ARGS.format(**args)})")
        code.do(f"%r{m}.next = add i64 %r{m}, {ROWS}", f"%w{m}.next = getelementptr i8, ptr %w{m}, i64 {tile_bytes}")
        more = code.value(f"icmp ult i64 %r{m}.next, %rows")
        code.do(f"br i1 {more}, label %tile{m}, label %group.end")
    code.do("group.end:", f"%m.next = add i64 %m, {size}")
    more = code.value("icmp ult i64 %m.next, %num_x")
    code.do(f"br i1 {more}, label %group, label %end", "end:", "ret void")
    args_text = _TILE_ARGS.format(**{a: f"%{a}" for a in ("w", "chunks", "x", "x_stride", "bias", "out", "n", "rows")})
    return code.function(f"internal void @block_{name}({args_text}, i64 %num_x) noinline nounwind")


def _unpack(name: str) -> str:
    """`num` chunks as float32 chunks."""
    code, parts = Code(), STEPS[name] // LANES
    code.do("entry:", "br label %loop", "loop:", "%c = phi i64 [0, %entry], [%c.next, %loop]")
    chunk = code.at("%w", code.value(f"mul i64 %c, {CHUNK_BYTES[name]}"))
    to = code.at("%to", code.value(f"mul i64 %c, {parts * CHUNK_BYTES['float32']}"))
    for part in range(parts):
        for row in range(ROWS):
            place = code.at(to, part * CHUNK_BYTES["float32"] + row * LINE)
            code.do(f"store {VECTOR} {_weights(code, name, chunk, row, part)}, ptr {place}, align 4")
    code.do("%c.next = add i64 %c, 1", "%more = icmp ult i64 %c.next, %num", "br i1 %more, label %loop, label %end")
    code.do("end:", "ret void")
    return code.function(f"internal void @unpack_{name}(ptr noalias %w, i64 %num, ptr noalias %to) noinline nounwind")


def _worker(name: str) -> str:
    """One thread's share of a call: takes block after block until none is left."""
    code = Code()
    code.do("entry:")
    call = code.slots("%call", _CALL)
    plan_at = code.pointer(call["plan"])
    plan, x, first_out = code.slots(plan_at, PLAN), code.pointer(call["x"]), code.pointer(call["out"])
    first_segment = code.at(plan_at, len(PLAN), "i64")
    turn = code.value(f"atomicrmw add ptr {code.at('%call', 1, 'i64')}, i64 1 monotonic")
    scratch = code.at(code.pointer(call["scratch"]), code.value(f"mul i64 {turn}, {plan['scratch_bytes']}"))
    unpacks = code.value(f"icmp uge i64 {call['num_x']}, {UNPACK_FROM[name]}")
    code.do("br label %take", "take:", "%b = atomicrmw add ptr %call, i64 1 monotonic")
    more = code.value(f"icmp ult i64 %b, {plan['num_blocks']}")
    code.do(
        f"br i1 {more}, label %find, label %end", "find:", f"%s = phi ptr [{first_segment}, %take], [%s.next, %skip]"
    )
    code.do("%i = phi i64 [%b, %take], [%i.next, %skip]", f"%o = phi ptr [{first_out}, %take], [%o.next, %skip]")
    segment = code.slots("%s", SEGMENT)
    inside = code.value(f"icmp ult i64 %i, {segment['num_blocks']}")
    code.do(f"br i1 {inside}, label %found, label %skip", "skip:", f"%i.next = sub i64 %i, {segment['num_blocks']}")
    code.do(f"%s.next = getelementptr i64, ptr %s, i64 {len(SEGMENT)}")
    size = code.value(f"mul i64 {call['num_x']}, {segment['num_rows']}")
    code.do(f"%o.next = getelementptr float, ptr %o, i64 {size}", "br label %find", "found:")
    row = code.value(f"mul i64 %i, {plan['block_rows']}")
    rest = code.value(f"sub i64 {segment['num_rows']}, {row}")
    rows = code.value(f"call i64 @llvm.umin.i64(i64 {rest}, i64 {plan['block_rows']})")
    chunk = code.value(f"mul i64 {code.value(f'udiv i64 {row}, {ROWS}')}, {plan['num_chunks']}")
    w = code.at(code.pointer(segment["weights"]), code.value(f"mul i64 {chunk}, {CHUNK_BYTES[name]}"))
    args = {"w": w, "chunks": plan["num_chunks"], "x": x, "x_stride": call["x_stride"], "n": segment["num_rows"]}
    args |= {
        "bias": code.at(code.pointer(segment["bias"]), row, "float"),
        "out": code.at("%o", row, "float"),
        "rows": rows,
    }
    code.do(f"br i1 {unpacks}, label %unpack, label %direct", "direct:")
    code.do(f"call void @block_{name}({_TILE_ARGS.format(**args)}, i64 {call['num_x']})", "br label %take", "unpack:")
    tiles = code.value(f"udiv i64 {code.value(f'add i64 {rows}, {ROWS - 1}')}, {ROWS}")
    num = code.value(f"mul i64 {tiles}, {plan['num_chunks']}")
    code.do(f"call void @unpack_{name}(ptr {w}, i64 {num}, ptr {scratch})")
    args |= {"w": scratch, "chunks": code.value(f"mul i64 {plan['num_chunks']}, {STEPS[name] // LANES}")}
    code.do(
        f"call void @block_float32({_TILE_ARGS.format(**args)}, i64 {call['num_x']})",
        "br label %take",
        "end:",
        "ret void",
    )
    return code.function(f"internal void @worker_{name}(ptr %call) nounwind")


def _entry(name: str, parallel: int) -> str:
    """Lays out the call on the stack and runs the worker here or on `threads` threads."""
    code = Code()
    code.do("entry:", f"%call = alloca [{len(_CALL)} x i64], align 16")
    for i, slot in enumerate(_CALL):
        code.do(f"store i64 {'0' if i < 2 else '%' + slot}, ptr {code.at('%call', i, 'i64')}")
    entry_code(code, f"worker_{name}", "%call", parallel)
    args = ", ".join(f"i64 %{slot}" for slot in _CALL[2:])
    return code.function(f"void @product_{name}({args}, i32 %threads)")
