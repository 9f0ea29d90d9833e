"""Machine code for attention of a chunk of one sequence over its slot, made with LLVM at run time for this CPU.

The unit of work is one key head and some tokens of the chunk with all query heads that share it: the rows of two small
matrix products per block of keys, between them the softmax, whose maxima and sums are carried from block to block
(Milakov and Gimelshein, arXiv 1805.02867; Dao et al., arXiv 2205.14135). Units, and the order of every sum, follow from
the layer's shape and the chunk alone, so threads change no bit. NaN and infinity go the way of IEEE. Knows addresses,
no tensors and no slots. Used by chunk_attention.py.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from common.engine.kernel_blocks import MASK, exp, finite, fma, functions, greater, lanes_below, load, store
from common.engine.kernel_llvm import LANES, VECTOR, Code, Once, add, compile_module, entry_code, shuffle, splat, tree

BLOCK = 64  # keys that a unit attends to at a time
# Rows of a product's tile, and vectors of its columns: ROWS * PANEL sums, PANEL and one more fill the registers.
ROWS, PANEL = 6, 4 if LANES == 16 else 2
UNIT_ROWS = 96  # about so many rows in a unit: they share the transposed keys
# Slots (int64) of a call; the first two are counters that threads take units and scratch memory by. Strides count
# floats, `scale` is the bits of a float. Keys and values: addresses of position 0. `scratch_size` in floats.
CALL = (
    "next", "next_scratch", "units", "kv_heads", "group", "key_dim", "value_dim", "window", "scale", "start",
    "length", "unit_tokens", "keys", "key_token", "key_head", "values", "value_token", "value_head", "query",
    "query_token", "query_head", "sinks", "out", "scratch", "scratch_size",
)  # fmt: skip

Attend = Callable[[int, int], None]
_LOWEST = "splat (float 0xFFF0000000000000)"


def _compile() -> tuple[Attend, object]:
    engine = compile_module(source)
    signature = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int32)
    return signature(engine.get_function_address("attend_chunk")), engine


# f(call, threads) and what owns its code, compiled at the first call. Calls may run at once, each with its own record.
chunk_kernel = Once(_compile, "kernels for attention of chunks are not available, torch attends")


def scratch_floats(rows: int, key_dim: int, value_dim: int) -> int:
    """Memory of one thread for units of `rows` rows; a multiple of a vector."""
    rows, key_dim = -(-rows // ROWS) * ROWS, -(-key_dim // LANES) * LANES
    size = rows * (key_dim + value_dim + 2) + BLOCK * (key_dim + ROWS) + ROWS
    return -(-size // 16) * 16


def source(parallel: int) -> str:
    """The LLVM module; `parallel` is the address of GOMP_parallel, or 0 where there is none."""
    parts = ["declare i64 @llvm.smax.i64(i64, i64)", "declare i64 @llvm.smin.i64(i64, i64)", *functions()]
    parts += [_transpose(), _product(PANEL, is_scaled=False)]
    parts += [_product(vectors, is_scaled=True) for vectors in range(1, PANEL + 1)]
    return "\n".join([*parts, _softmax(), _tile(), _unit(), _worker(), _entry(parallel)])


def _least(code: Code, a: str, b: str | int) -> str:
    return code.value(f"call i64 @llvm.smin.i64(i64 {a}, i64 {b})")


def _transpose() -> str:
    """to[column, token] = keys[token, column] of %num <= BLOCK tokens; zeros where either is missing."""
    code = Code()
    code.do("entry:")

    def square(token: str, column: str) -> None:
        left = code.number("sub", "%dim", column)
        vectors = []
        for i in range(LANES):
            at = code.number("add", token, i)
            is_there = code.value(f"icmp slt i64 {at}, %num")
            width = code.value(f"select i1 {is_there}, i64 {left}, i64 0")
            row = code.at("%keys", code.number("mul", at, "%stride"), "float")
            later = code.at(code.at(row, code.number("mul", "%stride", BLOCK), "float"), column, "float")
            code.do(f"call void @llvm.prefetch.p0(ptr {later}, i32 0, i32 3, i32 1)")
            vectors.append(load(code, row, column, lanes_below(code, width)))
        apart = LANES // 2
        while apart:
            vectors = _exchange(code, vectors, apart)
            apart //= 2
        for i, vector in enumerate(vectors):
            row = code.number("mul", code.number("add", column, i), BLOCK)
            store(code, vector, "%to", code.number("add", row, token))

    code.each(
        str(BLOCK),
        lambda token: code.each("%dim", lambda column: square(token, column), step=LANES),
        step=LANES,
    )
    code.do("ret void")
    args = "ptr %keys, i64 %stride, i64 %num, i64 %dim, ptr noalias %to"
    return code.function(f"internal void @transpose({args}) noinline nounwind")


def _exchange(code: Code, vectors: list[str], width: int) -> list[str]:
    """One step of a transposition: vectors `width` apart swap blocks of as many lanes."""
    found = list(vectors)
    low = [lane if not lane & width else LANES + lane - width for lane in range(LANES)]
    high = [lane + width if not lane & width else LANES + lane for lane in range(LANES)]
    for i in range(LANES):
        if not i & width:
            a, b = vectors[i], vectors[i + width]
            found[i], found[i + width] = shuffle(code, a, b, low), shuffle(code, a, b, high)
    return found


def _product(vectors: int, *, is_scaled: bool) -> str:
    """c[row, column] = a[row, :] b[:, column] for ROWS rows and some vectors of columns; `scaled` adds c times %by."""
    code = Code()
    code.do("entry:")
    rows = [code.at("%a", code.number("mul", "%a_row", r), "float") for r in range(ROWS)]
    outs = [code.at("%c", code.number("mul", "%c_row", r), "float") for r in range(ROWS)]

    def step(k: str, sums: list[str]) -> list[str]:
        line = code.at("%b", code.number("mul", k, "%b_row"), "float")
        columns = [load(code, line, str(v * LANES)) for v in range(vectors)]
        fresh = []
        for r in range(ROWS):
            x = splat(code, code.load(rows[r], k, "float"))
            fresh += [fma(code, x, columns[v], sums[r * vectors + v]) for v in range(vectors)]
        return fresh

    # The block's own sum first: added key by key onto what is there, a long context would be one chain of roundings.
    _, *sums = code.loop("%num", step, carried=[(VECTOR, "zeroinitializer")] * (ROWS * vectors))
    for r in range(ROWS):
        factor = splat(code, code.load("%by", r, "float")) if is_scaled else ""
        for v in range(vectors):
            total = sums[r * vectors + v]
            if is_scaled:
                total = fma(code, load(code, outs[r], str(v * LANES)), factor, total)
            store(code, total, outs[r], str(v * LANES))
    code.do("ret void")
    name = f"scaled_{vectors}" if is_scaled else "fresh"
    args = "ptr %a, i64 %a_row, i64 %num, ptr %b, i64 %b_row, ptr %c, i64 %c_row, ptr %by"
    return code.function(f"internal void @{name}({args}) noinline nounwind")


def _softmax() -> str:
    """A row's scores, of which columns [%low, %high) count, become weights; its maximum, sum and %by follow."""
    code = Code()
    code.do("entry:")
    scores = []
    for start in range(0, BLOCK, LANES):
        below = lanes_below(code, code.number("sub", "%high", start))
        early = lanes_below(code, code.number("sub", "%low", start))
        own = code.value(f"select {MASK} {below}, {VECTOR} {load(code, '%scores', str(start))}, {VECTOR} {_LOWEST}")
        scores.append(code.value(f"select {MASK} {early}, {VECTOR} {_LOWEST}, {VECTOR} {own}"))
    most = scores[0]
    for vector in scores[1:]:
        most = greater(code, vector, most)
    here, before = tree(code, most, greater), code.load("%most", 0, "float")
    more = code.value(f"fcmp ogt float {here}, {before}")
    maximum = code.value(f"select i1 {more}, float {here}, float {before}")
    base = finite(code, maximum)
    fading = exp(code, splat(code, code.value(f"fsub float {before}, {base}")))
    by = code.value(f"extractelement {VECTOR} {fading}, i32 0")
    total, spread = "zeroinitializer", splat(code, base)
    for i, vector in enumerate(scores):
        weight = exp(code, code.value(f"fsub {VECTOR} {vector}, {spread}"))
        store(code, weight, "%scores", str(i * LANES))
        total = add(code, total, weight)
    kept = code.value(f"fmul float {code.load('%sum', 0, 'float')}, {by}")
    code.do(f"store float {code.value(f'fadd float {kept}, {tree(code, total, add)}')}, ptr %sum, align 4")
    code.do(f"store float {maximum}, ptr %most, align 4", f"store float {by}, ptr %by, align 4", "ret void")
    args = "ptr %scores, i64 %low, i64 %high, ptr %most, ptr %sum, ptr %by"
    return code.function(f"internal void @softmax_row({args}) noinline nounwind")


def _tile() -> str:
    """ROWS rows attend to a block of %num keys from position %at on. Nothing is done where no row sees any of them."""
    code = Code()
    code.do("entry:")

    def bounds(row: str) -> tuple[str, str]:
        token = _least(code, code.number("udiv", row, "%group"), "%last")
        high = code.number("sub", code.number("add", code.number("add", "%position", token), 1), "%at")
        has_window = code.value("icmp ne i64 %window, 0")
        early = code.number("sub", high, "%window")
        return code.value(f"select i1 {has_window}, i64 {early}, i64 0"), high

    _, latest = bounds(code.number("add", "%row", ROWS - 1))
    earliest, _ = bounds("%row")
    some = code.value(f"icmp sgt i64 {latest}, 0")
    inside = code.value(f"icmp slt i64 {earliest}, %num")
    code.do(f"%is_seen = and i1 {some}, {inside}", "br i1 %is_seen, label %work, label %end", "work:")
    for start in range(0, BLOCK, PANEL * LANES):
        keys, scores = code.at("%keys", start, "float"), code.at("%scores", start, "float")
        code.do(
            f"call void @fresh(ptr %query, i64 %padded, i64 %padded, ptr {keys}, i64 {BLOCK}, "
            f"ptr {scores}, i64 {BLOCK}, ptr %by)"
        )

    def row(r: str) -> None:
        low, high = bounds(code.number("add", "%row", r))
        places = [code.at(base, r, "float") for base in ("%most", "%sum", "%by")]
        scores = code.at("%scores", code.number("mul", r, BLOCK), "float")
        code.do(f"call void @softmax_row(ptr {scores}, i64 {low}, i64 {high}, ptr {', ptr '.join(places)})")

    code.each(str(ROWS), row)

    def columns(column: str, vectors: int) -> None:
        values, out = code.at("%values", column, "float"), code.at("%out", column, "float")
        code.do(
            f"call void @scaled_{vectors}(ptr %scores, i64 {BLOCK}, i64 %num, ptr {values}, i64 %value_token, "
            f"ptr {out}, i64 %value_dim, ptr %by)"
        )

    wide = PANEL * LANES
    column = code.each(code.number("sub", "%value_dim", wide - 1), lambda c: columns(c, PANEL), step=wide)
    code.each("%value_dim", lambda c: columns(c, 1), start=column, step=LANES)
    code.do("br label %end", "end:", "ret void")
    args = (
        "i64 %row, i64 %group, i64 %last, i64 %position, i64 %window, i64 %at, i64 %num, ptr %query, i64 %padded, "
        "ptr %keys, ptr %scores, ptr %values, i64 %value_token, i64 %value_dim, ptr %out, ptr %most, ptr %sum, ptr %by"
    )
    return code.function(f"internal void @tile({args}) noinline nounwind")


class _Unit:
    """Code of a unit: key head %head, tokens [%token, %token + %num) of the chunk; places in its scratch memory."""

    def __init__(self, code: Code) -> None:
        self.code, self.call = code, code.slots("%call", CALL)
        group, value_dim = self.call["group"], self.call["value_dim"]
        self.padded = code.number("and", code.number("add", self.call["key_dim"], LANES - 1), -LANES)
        self.last = code.number("sub", "%num", 1)
        self.num_rows = code.number("mul", "%num", group)
        tiles = code.number("udiv", code.number("add", self.num_rows, ROWS - 1), ROWS)
        self.rows = code.number("mul", tiles, ROWS)
        self.keys = code.at("%scratch", code.number("mul", self.rows, self.padded), "float")
        self.scores = code.at(self.keys, code.number("mul", self.padded, BLOCK), "float")
        self.outs = code.at(self.scores, ROWS * BLOCK, "float")
        self.most = code.at(self.outs, code.number("mul", self.rows, value_dim), "float")
        self.sums = code.at(self.most, self.rows, "float")
        self.by = code.at(self.sums, self.rows, "float")

    def token_and_head(self, row: str) -> tuple[str, str]:
        """Of the chunk, and among all query heads."""
        code, group = self.code, self.call["group"]
        head = code.number("add", code.number("mul", "%head", group), code.number("urem", row, group))
        return code.number("add", "%token", code.number("udiv", row, group)), head

    def out(self, row: str) -> str:
        """Where a row's result is summed up."""
        code = self.code
        return code.at(self.outs, code.number("mul", row, self.call["value_dim"]), "float")

    def prepare(self, row: str) -> None:
        """Query times scale, and the state of the softmax before the first key. Rows behind the last are copies."""
        code, call = self.code, self.call
        token, head = self.token_and_head(_least(code, row, code.number("sub", self.num_rows, 1)))
        place = code.number("mul", token, call["query_token"])
        place = code.number("add", place, code.number("mul", head, call["query_head"]))
        query = code.at(code.pointer(call["query"]), place, "float")
        to = code.at("%scratch", code.number("mul", row, self.padded), "float")
        bits = code.value(f"trunc i64 {call['scale']} to i32")
        scale = code.value(f"bitcast i32 {bits} to float")
        code.do(f"call void @query(ptr {query}, i64 {call['key_dim']}, float {scale}, ptr {to})")
        sink = code.load(code.pointer(call["sinks"]), head, "float")
        is_none = code.value(f"fcmp oeq float {sink}, 0xFFF0000000000000")
        weight = code.value(f"select i1 {is_none}, float 0.0, float 1.0")
        code.do(f"store float {sink}, ptr {code.at(self.most, row, 'float')}, align 4")
        code.do(f"store float {weight}, ptr {code.at(self.sums, row, 'float')}, align 4")
        out = self.out(row)
        code.each(call["value_dim"], lambda c: store(code, "zeroinitializer", out, c), step=LANES)

    def attend(self) -> None:
        """To every block of keys that a row sees."""
        code, call = self.code, self.call
        position = code.number("add", call["start"], "%token")
        stop = code.number("add", code.number("add", position, self.last), 1)
        has_window = code.value(f"icmp ne i64 {call['window']}, 0")
        early = code.number("add", code.number("sub", position, call["window"]), 1)
        begin = code.value(f"select i1 {has_window}, i64 {early}, i64 0")
        begin = code.value(f"call i64 @llvm.smax.i64(i64 {begin}, i64 0)")
        code.each(stop, lambda at: self._block(at, position, stop), start=begin, step=BLOCK)

    def _block(self, at: str, position: str, stop: str) -> None:
        code, call = self.code, self.call
        num = _least(code, code.number("sub", stop, at), BLOCK)
        places = []
        for name in ("key", "value"):
            place = code.number("mul", at, call[f"{name}_token"])
            place = code.number("add", place, code.number("mul", "%head", call[f"{name}_head"]))
            places.append(code.at(code.pointer(call[f"{name}s"]), place, "float"))
        code.each(num, lambda token: self._ask(places[1], token))
        sizes = f"i64 {call['key_token']}, i64 {num}, i64 {call['key_dim']}"
        code.do(f"call void @transpose(ptr {places[0]}, {sizes}, ptr {self.keys})")

        def tile(row: str) -> None:
            query = code.at("%scratch", code.number("mul", row, self.padded), "float")
            ends = f"ptr {code.at(self.most, row, 'float')}, ptr {code.at(self.sums, row, 'float')}, ptr {self.by}"
            code.do(
                f"call void @tile(i64 {row}, i64 {call['group']}, i64 {self.last}, i64 {position}, "
                f"i64 {call['window']}, i64 {at}, i64 {num}, ptr {query}, i64 {self.padded}, ptr {self.keys}, "
                f"ptr {self.scores}, ptr {places[1]}, i64 {call['value_token']}, i64 {call['value_dim']}, "
                f"ptr {self.out(row)}, {ends})"
            )

        code.each(self.rows, tile, step=ROWS)

    def _ask(self, values: str, token: str) -> None:
        """For the lines of a token's values, which are needed once the weights are known."""
        code, call = self.code, self.call
        row = code.at(values, code.number("mul", token, call["value_token"]), "float")
        ask = "call void @llvm.prefetch.p0(ptr {}, i32 0, i32 3, i32 1)"
        code.each(call["value_dim"], lambda c: code.do(ask.format(code.at(row, c, "float"))), step=16)

    def finish(self, row: str) -> None:
        """The row's sum over the weights' sum."""
        code, call = self.code, self.call
        token, head = self.token_and_head(row)
        heads = code.number("mul", call["kv_heads"], call["group"])
        place = code.number("mul", code.number("add", code.number("mul", token, heads), head), call["value_dim"])
        to, out = code.at(code.pointer(call["out"]), place, "float"), self.out(row)
        total = splat(code, code.load(self.sums, row, "float"))

        def divide(c: str) -> None:
            store(code, code.value(f"fdiv {VECTOR} {load(code, out, c)}, {total}"), to, c)

        code.each(call["value_dim"], divide, step=LANES)


def _unit() -> str:
    code = Code()
    code.do("entry:")
    unit = _Unit(code)
    code.each(unit.rows, unit.prepare)
    unit.attend()
    code.each(unit.num_rows, unit.finish)
    code.do("ret void")
    return code.function(
        "internal void @unit(ptr %call, i64 %head, i64 %token, i64 %num, ptr %scratch) noinline nounwind"
    )


def _worker() -> str:
    """One thread's share of a call: takes unit after unit, the last tokens, with most to do, first."""
    code = Code()
    code.do("entry:")
    call = code.slots("%call", CALL)
    turn = code.value(f"atomicrmw add ptr {code.at('%call', 1, 'i64')}, i64 1 monotonic")
    scratch = code.at(code.pointer(call["scratch"]), code.number("mul", turn, call["scratch_size"]), "float")
    code.do("br label %take", "take:", "%taken = atomicrmw add ptr %call, i64 1 monotonic")
    code.do(f"%more = icmp slt i64 %taken, {call['units']}", "br i1 %more, label %work, label %end", "work:")
    unit = code.number("sub", code.number("sub", call["units"], 1), "%taken")
    head, part = code.number("urem", unit, call["kv_heads"]), code.number("udiv", unit, call["kv_heads"])
    token = code.number("mul", part, call["unit_tokens"])
    num = _least(code, code.number("sub", call["length"], token), call["unit_tokens"])
    code.do(f"call void @unit(ptr %call, i64 {head}, i64 {token}, i64 {num}, ptr {scratch})", "br label %take")
    code.do("end:", "ret void")
    return code.function("internal void @chunk_worker(ptr %call) nounwind")


def _entry(parallel: int) -> str:
    """Attends here or on `threads` threads."""
    code = Code()
    code.do("entry:", "%call = inttoptr i64 %call_at to ptr", "store i64 0, ptr %call")
    code.do(f"store i64 0, ptr {code.at('%call', 1, 'i64')}")
    entry_code(code, "chunk_worker", "%call", parallel)
    return code.function("void @attend_chunk(i64 %call_at, i32 %threads)")
