"""Machine code for attention of decode rows over their slots, made with LLVM at run time for this CPU.

One call serves one layer and all rows of a batch: it writes each row's new key and value into the slot, then attends
from the row's query heads to the slot's rows. The unit of work is a block of a row's tokens, all heads; a thread takes
block after block, and who finishes a row's last block merges them in order. Blocks, and the order of every sum, follow
from the layer's shape and the row's position alone, so neither the batch nor the threads change a bit of the result.
Softmax subtracts the maximum of a block; NaN and infinity go the way of IEEE. Knows addresses, no tensors and no slots.
Used by decode_rows.py.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from common.engine.kernel_blocks import BLOCK, GROUP, exp, finite, fma, functions, lanes_below, load, store
from common.engine.kernel_llvm import LANES, VECTOR, Code, Once, compile_module, entry_code, splat

# Slots (int64) of a layer's plan. Strides count floats, `scale` is the bits of a float. A row's second piece is written
# `second_at` floats behind its values' address: there, latent rows are both keys and values, and have their rest.
PLAN = (
    "number", "kv_heads", "group", "key_dim", "value_dim", "key_stride", "value_stride", "window", "scale",
    "first_width", "second_width", "second_at",
)  # fmt: skip
# Slots of a call. `next` is a counter of blocks taken. `table` [num_rows, table_row] has, at 2 * number, the addresses
# of the row of keys and of values of token 0; `starts` the position of each new token. All rows are
# written, the first `num_attending` attend. Query, first and second have a
# stride per row and per head. `partial`: PARTIAL floats per head and block, behind one int64 per row.
CALL = (
    "next", "plan", "table", "table_row", "starts", "num_rows", "num_attending", "num_blocks", "query", "query_row",
    "query_head", "first", "first_row", "first_head", "second", "second_row", "second_head", "sinks", "out", "partial",
)  # fmt: skip

Attend = Callable[[int, int], None]


def _compile() -> tuple[Attend, object]:
    engine = compile_module(source)
    signature = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int32)
    return signature(engine.get_function_address("attend")), engine


# f(call, threads) and what owns its code, compiled at the first call. Calls may run at once, each with its own record.
attention = Once(_compile, "attention kernels are not available, torch attends")


def scratch_floats(num_rows: int, num_blocks: int, heads: int, value_dim: int) -> int:
    """Size of `partial`."""
    return 2 * num_rows + num_rows * num_blocks * heads * (value_dim + 2)


def source(parallel: int) -> str:
    """The LLVM module; `parallel` is the address of GOMP_parallel, or 0 where there is none."""
    parts = [
        "declare i64 @llvm.smax.i64(i64, i64)",
        "declare i64 @llvm.smin.i64(i64, i64)",
        "declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)",
    ]
    return "\n".join([*parts, *functions(), _block(), _merge(), _write(), _worker(), _entry(parallel)])


def _row_size(code: Code, plan: dict[str, str]) -> tuple[str, str]:
    """Query heads, and the floats of `partial` for one block: maximum and sum of every head, then their values."""
    heads = code.number("mul", plan["kv_heads"], plan["group"])
    return heads, code.number("mul", heads, code.number("add", plan["value_dim"], 2))


def _block() -> str:
    """One block of one row, all heads; %partial gets its part of the result."""
    code = Code()
    code.do("entry:")
    plan = code.slots("%plan", PLAN)
    padded = code.number("and", code.number("add", plan["key_dim"], LANES - 1), -LANES)
    code.do(f"%queries = alloca float, i64 {code.number('mul', padded, GROUP)}, align 64")
    code.do(f"%scores = alloca float, i64 {GROUP * BLOCK}, align 64")
    bits = code.value(f"trunc i64 {plan['scale']} to i32")
    scale = code.value(f"bitcast i32 {bits} to float")
    heads, _ = _row_size(code, plan)
    outs = code.at("%partial", code.number("mul", heads, 2), "float")
    parts = code.number("udiv", code.number("add", plan["group"], GROUP - 1), GROUP)

    def attend(kv_head: str, part: str) -> None:
        begin = code.number("udiv", code.number("mul", part, plan["group"]), parts)
        stop = code.number("udiv", code.number("mul", code.number("add", part, 1), plan["group"]), parts)
        size = code.number("sub", stop, begin)
        head = code.number("add", code.number("mul", kv_head, plan["group"]), begin)

        def query(i: str) -> None:
            place = code.at("%query", code.number("mul", code.number("add", head, i), "%query_head"), "float")
            to = code.at("%queries", code.number("mul", i, padded), "float")
            code.do(f"call void @query(ptr {place}, i64 {plan['key_dim']}, float {scale}, ptr {to})")

        code.each(size, query)
        keys = code.at("%keys", code.number("mul", kv_head, plan["key_dim"]), "float")
        values = code.at("%values", code.number("mul", kv_head, plan["value_dim"]), "float")
        ends = code.at("%partial", code.number("mul", head, 2), "float")
        out = code.at(outs, code.number("mul", head, plan["value_dim"]), "float")
        name = f"size{len(code.lines)}"
        cases = " ".join(f"i64 {n}, label %{name}.{n}" for n in range(1, GROUP))
        code.do(f"switch i64 {size}, label %{name}.{GROUP} [{cases}]")
        for n in range(1, GROUP + 1):
            code.do(f"{name}.{n}:")
            code.do(
                f"call void @scores_{n}(ptr {keys}, i64 {plan['key_stride']}, i64 %num, ptr %queries, i64 {padded}, "
                f"i64 {plan['key_dim']}, ptr %scores)"
            )
            for i in range(n):
                scores = code.at("%scores", i * BLOCK, "float")
                code.do(f"call void @softmax(ptr {scores}, i64 %num, ptr {code.at(ends, 2 * i, 'float')})")
            code.do(
                f"call void @values_{n}(ptr {values}, i64 {plan['value_stride']}, i64 %num, ptr %scores, "
                f"i64 {plan['value_dim']}, ptr {out})"
            )
            code.do(f"br label %{name}.end")
        code.do(f"{name}.end:")

    code.each(plan["kv_heads"], lambda head: code.each(parts, lambda part: attend(head, part)))
    code.do("ret void")
    args = "ptr %plan, ptr %keys, ptr %values, i64 %num, ptr %query, i64 %query_head, ptr noalias %partial"
    return code.function(f"internal void @block({args}) noinline nounwind")


def _merge() -> str:
    """The %num blocks of a row, %size floats apart, become its result. Sinks weigh in the sum and give nothing."""
    code = Code()
    code.do("entry:")
    outs = code.at("%partial", code.number("mul", "%heads", 2), "float")

    def weight(score: str, base: str) -> str:
        power = exp(code, splat(code, code.value(f"fsub float {score}, {base}")))
        return code.value(f"extractelement {VECTOR} {power}, i32 0")

    def merge(head: str) -> None:
        ends = code.at("%partial", code.number("mul", head, 2), "float")
        sink = code.load("%sinks", head, "float")

        def most(i: str, so_far: list[str]) -> list[str]:
            score = code.load(ends, code.number("mul", i, "%size"), "float")
            more = code.value(f"fcmp ogt float {score}, {so_far[0]}")
            return [code.value(f"select i1 {more}, float {score}, float {so_far[0]}")]

        base = finite(code, code.loop("%num", most, carried=[("float", sink)])[1])

        def add_block(i: str, total: list[str]) -> list[str]:
            end = code.at(ends, code.number("mul", i, "%size"), "float")
            own = weight(code.load(end, 0, "float"), base)
            code.do(f"store float {own}, ptr {end}, align 4")
            part = code.value(f"fmul float {own}, {code.load(end, 1, 'float')}")
            return [code.value(f"fadd float {total[0]}, {part}")]

        total = splat(code, code.loop("%num", add_block, carried=[("float", weight(sink, base))])[1])

        def column(c: str) -> None:
            lanes = lanes_below(code, code.number("sub", "%dim", c))
            place = code.number("add", code.number("mul", head, "%dim"), c)

            def add_values(i: str, sums: list[str]) -> list[str]:
                at = code.number("mul", i, "%size")
                values = load(code, code.at(outs, at, "float"), place, lanes)
                return [fma(code, splat(code, code.load(ends, at, "float")), values, sums[0])]

            _, values = code.loop("%num", add_values, carried=[(VECTOR, "zeroinitializer")])
            store(code, code.value(f"fdiv {VECTOR} {values}, {total}"), "%out", place, lanes)

        code.each("%dim", column, step=LANES)

    code.each("%heads", merge)
    code.do("ret void")
    args = "ptr noalias %partial, i64 %num, i64 %size, i64 %heads, i64 %dim, ptr %sinks, ptr noalias %out"
    return code.function(f"internal void @merge({args}) noinline nounwind")


def _rows_of(code: Code, call: dict[str, str], plan: dict[str, str], row: str) -> tuple[str, str, str]:
    """The position of a row's new token, and the addresses of keys and values of its token 0."""
    place = code.number("mul", row, call["table_row"])
    place = code.number("add", place, code.number("mul", plan["number"], 2))
    table = code.at(code.pointer(call["table"]), place, "i64")
    start = code.load(code.pointer(call["starts"]), row)
    return start, code.pointer(code.load(table, 0)), code.pointer(code.load(table, 1))


def _write() -> str:
    """Every row's new key and value go into its slot."""
    code = Code()
    code.do("entry:")
    call = code.slots("%call", CALL)
    plan = code.slots(code.pointer(call["plan"]), PLAN)

    def write(row: str) -> None:
        start, keys, values = _rows_of(code, call, plan, row)
        rest = code.number("add", code.number("mul", start, plan["value_stride"]), plan["second_at"])
        targets = (
            code.at(keys, code.number("mul", start, plan["key_stride"]), "float"),
            code.at(values, rest, "float"),
        )

        def copy(head: str) -> None:
            for piece, target, dim in zip(("first", "second"), targets, ("key_dim", "value_dim"), strict=True):
                place = code.number("mul", row, call[f"{piece}_row"])
                place = code.number("add", place, code.number("mul", head, call[f"{piece}_head"]))
                source = code.at(code.pointer(call[piece]), place, "float")
                to = code.at(target, code.number("mul", head, plan[dim]), "float")
                size = code.number("mul", plan[f"{piece}_width"], 4)
                code.do(f"call void @llvm.memcpy.p0.p0.i64(ptr {to}, ptr {source}, i64 {size}, i1 false)")

        code.each(plan["kv_heads"], copy)

    code.each(call["num_rows"], write)
    code.do("ret void")
    return code.function("internal void @write(ptr %call) noinline nounwind")


def _worker() -> str:
    """One thread's share of a call: takes block after block until none is left."""
    code = Code()
    code.do("entry:")
    call = code.slots("%call", CALL)
    plan_at = code.pointer(call["plan"])
    plan = code.slots(plan_at, PLAN)
    counters = code.pointer(call["partial"])
    partial = code.at(counters, call["num_rows"], "i64")
    heads, size = _row_size(code, plan)
    num = code.number("mul", call["num_attending"], call["num_blocks"])
    code.do("br label %take", "take:", "%taken = atomicrmw add ptr %call, i64 1 monotonic")
    code.do(f"%more = icmp slt i64 %taken, {num}", "br i1 %more, label %found, label %end", "found:")
    # A block of every row, then the next block: rows of one slot share what the caches hold.
    row, block = (code.number(operation, "%taken", call["num_attending"]) for operation in ("urem", "udiv"))
    start, keys, values = _rows_of(code, call, plan, row)
    stop = code.number("add", start, 1)
    has_window = code.value(f"icmp ne i64 {plan['window']}, 0")
    early = code.value(f"call i64 @llvm.smax.i64(i64 {code.number('sub', stop, plan['window'])}, i64 0)")
    first = code.value(f"select i1 {has_window}, i64 {early}, i64 0")
    left = code.number("sub", stop, first)
    own = code.number("mul", block, BLOCK)
    code.do(f"%some = icmp slt i64 {own}, {left}", "br i1 %some, label %work, label %take", "work:")
    tokens = code.value(f"call i64 @llvm.smin.i64(i64 {BLOCK}, i64 {code.number('sub', left, own)})")
    token = code.number("add", first, own)
    keys = code.at(keys, code.number("mul", token, plan["key_stride"]), "float")
    values = code.at(values, code.number("mul", token, plan["value_stride"]), "float")
    query = code.at(code.pointer(call["query"]), code.number("mul", row, call["query_row"]), "float")
    blocks = code.at(partial, code.number("mul", code.number("mul", row, call["num_blocks"]), size), "float")
    mine = code.at(blocks, code.number("mul", block, size), "float")
    code.do(
        f"call void @block(ptr {plan_at}, ptr {keys}, ptr {values}, i64 {tokens}, ptr {query}, "
        f"i64 {call['query_head']}, ptr {mine})"
    )
    # Whoever finishes a row's last block sees what the others wrote.
    done = code.value(f"atomicrmw add ptr {code.at(counters, row, 'i64')}, i64 1 acq_rel")
    all_blocks = code.number("udiv", code.number("add", left, BLOCK - 1), BLOCK)
    code.do(f"%last = icmp eq i64 {code.number('add', done, 1)}, {all_blocks}")
    code.do("br i1 %last, label %merge, label %take", "merge:")
    width = code.number("mul", heads, plan["value_dim"])
    out = code.at(code.pointer(call["out"]), code.number("mul", row, width), "float")
    code.do(
        f"call void @merge(ptr {blocks}, i64 {all_blocks}, i64 {size}, i64 {heads}, i64 {plan['value_dim']}, "
        f"ptr {code.pointer(call['sinks'])}, ptr {out})"
    )
    code.do("br label %take", "end:", "ret void")
    return code.function("internal void @attend_worker(ptr %call) nounwind")


def _entry(parallel: int) -> str:
    """Writes the new rows, then attends here or on `threads` threads."""
    code = Code()
    code.do("entry:", "%call = inttoptr i64 %call_at to ptr", "store i64 0, ptr %call")
    call = code.slots("%call", CALL)
    counters = code.pointer(call["partial"])
    code.each(call["num_rows"], lambda row: code.do(f"store i64 0, ptr {code.at(counters, row, 'i64')}"))
    code.do("call void @write(ptr %call)")
    entry_code(code, "attend_worker", "%call", parallel)
    return code.function("void @attend(i64 %call_at, i32 %threads)")
