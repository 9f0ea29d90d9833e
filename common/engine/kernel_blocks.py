"""Machine code for a block of tokens that a few query heads of one key head attend to: scores, softmax, values.

Each sum adds in an order that depends on nothing but the block. Rows are read in whole vectors, the last one masked, so
nothing outside a row is touched. NaN and infinity go the way of IEEE. Knows addresses. Used by kernel_attention.py.
"""

from __future__ import annotations

import struct

from common.engine.kernel_llvm import FMA, LANES, VECTOR, Code, add, splat, totals, tree

GROUP = 3  # query heads that share one pass over keys or values
BLOCK = 64  # tokens of a block: its keys and values stay in a core's second-level cache while all heads attend to them
TOKENS = 4  # keys that one step scores; GROUP * TOKENS accumulators fill the registers
AHEAD = 8  # how many keys ahead memory is asked for; the values of a block then come fast enough by themselves
COLUMNS = {1: 8, 2: 4, 3: 4}  # vectors of a value's columns that one pass sums, by number of heads

# Of e^r on |r| <= ln(2)/2: 1 + r + r^2 (...), relative error 3e-9; ln(2) in two parts.
_EXP = (0.49999994039535522, 0.16666519641876221, 0.041668392717838287, 0.0083687808364629745, 0.0013814467238262296)
_LN2 = (0.693145751953125, 1.4286068203e-06)
_EXP_LOWEST = -87.0  # below it, e^x is taken as 0: with a sum of at least 1, no result can tell
_ROUND = 12582912.0  # 1.5 * 2^23: adding it leaves a rounded number in the low bits

MASK, INTS = f"<{LANES} x i1>", f"<{LANES} x i32>"
DECLARATIONS = (
    "declare void @llvm.prefetch.p0(ptr, i32, i32, i32)",
    FMA,
    f"declare {VECTOR} @llvm.masked.load.v{LANES}f32.p0(ptr, i32, {MASK}, {VECTOR})",
    f"declare void @llvm.masked.store.v{LANES}f32.p0({VECTOR}, ptr, i32, {MASK})",
)


def functions() -> list[str]:
    """All functions of the module that this file makes."""
    parts = [f(heads) for heads in range(1, GROUP + 1) for f in (_scores, _values)]
    return [*DECLARATIONS, *parts, _softmax(), _query()]


# -- vectors


def load(code: Code, base: str, index: str, mask: str = "") -> str:
    """A vector from base[index] on; lanes outside the mask are 0 and are not touched."""
    place = code.at(base, index, "float")
    if not mask:
        return code.value(f"load {VECTOR}, ptr {place}, align 4")
    return code.value(
        f"call {VECTOR} @llvm.masked.load.v{LANES}f32.p0(ptr {place}, i32 4, {MASK} {mask}, {VECTOR} zeroinitializer)"
    )


def store(code: Code, vector: str, base: str, index: str, mask: str = "") -> None:
    """A vector to base[index] on; lanes outside the mask are not touched."""
    place = code.at(base, index, "float")
    if mask:
        code.do(f"call void @llvm.masked.store.v{LANES}f32.p0({VECTOR} {vector}, ptr {place}, i32 4, {MASK} {mask})")
    else:
        code.do(f"store {VECTOR} {vector}, ptr {place}, align 4")


def lanes_below(code: Code, num: str) -> str:
    """A mask of the first `num` lanes, an i64 of any size that fits 32 bits."""
    small = code.value(f"trunc i64 {num} to i32")
    first = code.value(f"insertelement {INTS} poison, i32 {small}, i32 0")
    every = code.value(f"shufflevector {INTS} {first}, {INTS} poison, {INTS} zeroinitializer")
    lanes = ", ".join(f"i32 {i}" for i in range(LANES))
    return code.value(f"icmp slt {INTS} <{lanes}>, {every}")


def fma(code: Code, a: str, b: str, c: str) -> str:
    """a * b + c, rounded once."""
    return code.value(f"call {VECTOR} @llvm.fma.v{LANES}f32({VECTOR} {a}, {VECTOR} {b}, {VECTOR} {c})")


def _constant(number: float) -> str:
    """The nearest float, in all lanes. LLVM writes a float as the bits of the double that equals it."""
    [single] = struct.unpack("<f", struct.pack("<f", number))
    [bits] = struct.unpack("<Q", struct.pack("<d", single))
    return f"splat (float {bits:#018x})"


def greater(code: Code, a: str, b: str, lanes: int = LANES) -> str:
    """The greater one; `b` where a is NaN."""
    kind = f"<{lanes} x float>"
    return code.value(f"select <{lanes} x i1> {code.value(f'fcmp ogt {kind} {a}, {b}')}, {kind} {a}, {kind} {b}")


def finite(code: Code, maximum: str) -> str:
    """A float to subtract: 0 in place of -infinity, so that nothing becomes NaN by it."""
    lowest = code.value(f"fcmp oeq float {maximum}, 0xFFF0000000000000")
    return code.value(f"select i1 {lowest}, float 0.0, float {maximum}")


def exp(code: Code, x: str) -> str:
    """e^x for x <= 0 or NaN."""
    turned = fma(code, x, _constant(1.4426950408889634), _constant(_ROUND))
    whole = code.value(f"fsub {VECTOR} {turned}, {_constant(_ROUND)}")
    rest = fma(code, whole, _constant(-_LN2[1]), fma(code, whole, _constant(-_LN2[0]), x))
    series = _constant(_EXP[-1])
    for factor in reversed(_EXP[:-1]):
        series = fma(code, series, rest, _constant(factor))
    square = code.value(f"fmul {VECTOR} {rest}, {rest}")
    value = add(code, fma(code, square, series, rest), _constant(1.0))
    # The low bits of `turned` are the exponent of 2; 127 of it in place is 1.0.
    exponent = code.value(f"shl {INTS} {code.value(f'bitcast {VECTOR} {turned} to {INTS}')}, splat (i32 23)")
    power = code.value(f"add {INTS} {exponent}, splat (i32 {127 << 23})")
    value = code.value(f"fmul {VECTOR} {value}, {code.value(f'bitcast {INTS} {power} to {VECTOR}')}")
    below = code.value(f"fcmp olt {VECTOR} {x}, {_constant(_EXP_LOWEST)}")
    return code.value(f"select {MASK} {below}, {VECTOR} zeroinitializer, {VECTOR} {value}")


# -- one block, `heads` query heads of one key head


def _scores(heads: int) -> str:
    """scores[head, token] = query . key; the query is padded with zeros to whole vectors."""
    code = Code()
    code.do("entry:")
    whole = code.number("and", "%dim", -LANES)
    mask = lanes_below(code, code.number("and", "%dim", LANES - 1))
    queries = [code.at("%query", code.number("mul", "%padded", h), "float") for h in range(heads)]

    def score(token: str, tokens: int) -> None:
        keys = [code.at("%keys", code.number("mul", "%stride", token), "float")]
        keys += [code.at(keys[0], code.number("mul", "%stride", i), "float") for i in range(1, tokens)]
        ahead = [code.at(key, code.number("mul", "%stride", AHEAD), "float") for key in keys if tokens > 1]

        def step(column: str, sums: list[str], mask: str = "") -> list[str]:
            if ahead and not mask:
                _ask_ahead(code, ahead, column)
            fresh, q = list(sums), [load(code, query, column) for query in queries]
            for i, key in enumerate(keys):
                k = load(code, key, column, mask)
                for h in range(heads):
                    fresh[h * tokens + i] = fma(code, q[h], k, sums[h * tokens + i])
            return fresh

        zeros = [(VECTOR, "zeroinitializer")] * (heads * tokens)
        column, *sums = code.loop(whole, step, step=LANES, carried=zeros)
        _, *sums = code.loop(
            "%dim", lambda c, s: step(c, s, mask), start=column, step=LANES, carried=[(VECTOR, s) for s in sums]
        )
        for h in range(heads):
            place = code.at(code.at("%out", h * BLOCK, "float"), token, "float")
            own = sums[h * tokens : (h + 1) * tokens]
            if tokens == 1:
                code.do(f"store float {tree(code, own[0], add)}, ptr {place}, align 4")
            else:
                code.do(f"store <4 x float> {totals(code, own)}, ptr {place}, align 4")

    token = code.each(code.number("sub", "%num", TOKENS - 1), lambda token: score(token, TOKENS), step=TOKENS)
    code.each("%num", lambda token: score(token, 1), start=token)
    code.do("ret void")
    args = "ptr %keys, i64 %stride, i64 %num, ptr noalias %query, i64 %padded, i64 %dim, ptr noalias %out"
    return code.function(f"internal void @scores_{heads}({args}) noinline nounwind")


def _ask_ahead(code: Code, keys: list[str], column: str) -> None:
    """Ask for the lines of four later keys. Two vectors of 8 share a line: each asks for two of the keys then."""
    asked, place = keys[: len(keys) * LANES // 16], column
    if LANES == 8:
        odd = code.number("lshr", code.number("mul", code.number("and", column, LANES), "%stride"), 2)
        place = code.number("add", column, odd)
    for key in asked:
        code.do(f"call void @llvm.prefetch.p0(ptr {code.at(key, place, 'float')}, i32 0, i32 3, i32 1)")


def _softmax() -> str:
    """Scores become e^(score - maximum); `end` gets the maximum and the sum. There is room for whole vectors."""
    code = Code()
    code.do("entry:")
    padded = code.number("and", code.number("add", "%num", LANES - 1), -LANES)

    lowest_float = "store float 0xFFF0000000000000, ptr"
    code.each(padded, lambda i: code.do(f"{lowest_float} {code.at('%scores', i, 'float')}, align 4"), start="%num")
    lowest = [(VECTOR, "splat (float 0xFFF0000000000000)")]
    _, most = code.loop(
        padded, lambda i, m: [greater(code, load(code, "%scores", i), m[0])], step=LANES, carried=lowest
    )
    maximum = tree(code, most, greater)
    base = splat(code, finite(code, maximum))

    def weigh(i: str, sums: list[str]) -> list[str]:
        weight = exp(code, code.value(f"fsub {VECTOR} {load(code, '%scores', i)}, {base}"))
        store(code, weight, "%scores", i)
        return [add(code, sums[0], weight)]

    _, total = code.loop(padded, weigh, step=LANES, carried=[(VECTOR, "zeroinitializer")])
    code.do(f"store float {maximum}, ptr %end, align 4")
    code.do(f"store float {tree(code, total, add)}, ptr {code.at('%end', 1, 'float')}, align 4", "ret void")
    return code.function("internal void @softmax(ptr noalias %scores, i64 %num, ptr noalias %end) noinline nounwind")


def _values(heads: int) -> str:
    """out[head, column] = sum over tokens of weights[head, token] * values[token, column], token after token."""
    code = Code()
    code.do("entry:")
    weights = [code.at("%weights", h * BLOCK, "float") for h in range(heads)]
    outs = [code.at("%out", code.number("mul", "%dim", h), "float") for h in range(heads)]

    def columns(column: str, vectors: int, mask: str = "") -> None:
        values = code.at("%values", column, "float")

        def token(t: str, sums: list[str]) -> list[str]:
            row = code.at(values, code.number("mul", "%stride", t), "float")
            w = [splat(code, code.load(weight, t, "float")) for weight in weights]
            fresh = []
            for i in range(vectors):
                v = load(code, row, str(i * LANES), mask)
                fresh += [fma(code, w[h], v, sums[i * heads + h]) for h in range(heads)]
            return fresh

        _, *sums = code.loop("%num", token, carried=[(VECTOR, "zeroinitializer")] * (heads * vectors))
        for h, out in enumerate(outs):
            for i in range(vectors):
                store(code, sums[i * heads + h], code.at(out, column, "float"), str(i * LANES), mask)

    many = COLUMNS[heads]
    column = code.each(code.number("sub", "%dim", many * LANES - 1), lambda c: columns(c, many), step=many * LANES)
    code.each(
        "%dim", lambda c: columns(c, 1, lanes_below(code, code.number("sub", "%dim", c))), start=column, step=LANES
    )
    code.do("ret void")
    args = "ptr %values, i64 %stride, i64 %num, ptr noalias %weights, i64 %dim, ptr noalias %out"
    return code.function(f"internal void @values_{heads}({args}) noinline nounwind")


def _query() -> str:
    """One head's query times the scale, padded with zeros to whole vectors."""
    code = Code()
    code.do("entry:")
    scale = splat(code, "%scale")

    def scale_part(i: str) -> None:
        query = load(code, "%from", i, lanes_below(code, code.number("sub", "%dim", i)))
        store(code, code.value(f"fmul {VECTOR} {query}, {scale}"), "%to", i)

    code.each("%dim", scale_part, step=LANES)
    code.do("ret void")
    return code.function("internal void @query(ptr %from, i64 %dim, float %scale, ptr noalias %to) noinline nounwind")
