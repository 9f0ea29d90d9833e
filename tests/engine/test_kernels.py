from __future__ import annotations

import copy
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from common.engine import kernel_code, kernel_llvm, kernels
from common.engine.kernel_code import STEPS
from common.engine.kernel_llvm import Once
from common.engine.kernel_product import MIN_PARALLEL, Product
from common.engine.kernel_weights import GROUP, InexactError, PackedWeight
from common.engine.kernels import FastLinear, LazyWeight, accelerate
from common.errors import EngineError

# (K, N): of whole tiles, odd, smaller than one tile, several blocks.
SHAPES = [(64, 48), (576, 192), (37, 5), (1, 1), (33, 2), (100, 301), (7, 3)]
NUM_X = [*range(1, 18), 31, 32, 67, 101]
FORMATS = list(STEPS)


@pytest.fixture(scope="module")
def made() -> kernel_code.Kernels:
    found = kernel_code.kernels()
    assert found is not None, kernel_code.reason()
    return found


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weight_in(format_: str, rows: int, cols: int) -> torch.Tensor:
    """Weights that the format holds exactly."""
    weight = random(rows, cols)
    if format_ == "float32":
        return weight
    if format_ == "bfloat16":
        return weight.bfloat16().float()
    groups = -(-cols // GROUP)
    scale = random(rows, groups, 1, seed=1).abs().half().float() + 2**-6
    low = random(rows, groups, 1, seed=2).half().float() if cols % GROUP == 0 else 0.0
    top = 127 if format_ == "int8" else 15
    levels = (random(rows, groups, GROUP, seed=3) * top).round().clamp(-top if format_ == "int8" else 0, top)
    levels[..., 0] = top
    if cols % GROUP != 1:
        levels[..., 1] = 0
    return (scale.half().float() * levels + (low if format_ == "int4" else 0.0)).flatten(1)[:, :cols].clone()


def product(made: kernel_code.Kernels, weight: torch.Tensor, format_: str, bias: torch.Tensor | None = None) -> Product:
    return Product(made, [PackedWeight.pack(weight, format_)], [bias])


def close(found: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """Within a few roundings of the sum of absolute terms, which float32 cannot do without."""
    wanted = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    terms = functional.linear(x.abs(), weight.abs(), None if bias is None else bias.abs())
    assert found.shape == wanted.shape and found.dtype == torch.float32
    assert ((found - wanted).abs() <= 2e-6 * terms + 1e-30).all()


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize(("cols", "rows"), SHAPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_equals_torch(made, format_, cols, rows, has_bias) -> None:
    weight, bias = weight_in(format_, rows, cols), random(rows, seed=1) if has_bias else None
    packed = PackedWeight.pack(weight, format_)
    multiply = Product(made, [packed], [bias])
    for num_x in NUM_X:
        x = random(num_x, cols, seed=num_x)
        close(multiply(x)[0], x, weight, bias)


@pytest.mark.parametrize("format_", FORMATS)
def test_as_accurate_as_torch(made, format_) -> None:
    weight, x = weight_in(format_, 384, 1536), random(16, 1536, seed=1)
    wanted = functional.linear(x.double(), weight.double())
    ours = (product(made, weight, format_)(x)[0] - wanted).abs().mean()
    theirs = (functional.linear(x, weight) - wanted).abs().mean()
    assert ours <= 1.1 * theirs


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize(("cols", "rows"), SHAPES)
def test_a_row_does_not_depend_on_its_company(made, format_, cols, rows) -> None:
    multiply = product(made, weight_in(format_, rows, cols), format_, random(rows))
    x = random(max(NUM_X), cols)
    alone = torch.cat([multiply(row[None])[0] for row in x])
    for num_x in NUM_X:
        assert torch.equal(multiply(x[:num_x])[0], alone[:num_x])


@pytest.mark.parametrize("format_", FORMATS)
def test_the_smallest_exact_format_gives_the_same_bits(made, format_) -> None:
    weight, x = weight_in(format_, 200, 96), random(40, 96)
    packed = PackedWeight.exact(weight)
    assert packed.format == format_
    assert torch.equal(packed.dense(), weight)
    assert torch.equal(Product(made, [packed], [None])(x)[0], product(made, weight, "float32")(x)[0])
    # One weight far from the rows that are tried first changes the choice.
    weight[-1, -1] *= 1 + 2**-20
    assert PackedWeight.exact(weight).format == "float32"


@pytest.mark.parametrize(("top", "format_"), [(8, "int4"), (16, "int8")])
def test_other_symmetric_blocks_are_exact_too(top, format_) -> None:
    levels = (random(96, 64) * top).round().clamp(-top, top - 1)
    levels.view(96, 2, GROUP)[..., 5] = -top
    packed = PackedWeight.exact(levels * 0.0123291015625)
    assert packed.format == format_ and torch.equal(packed.dense(), levels * 0.0123291015625)


@pytest.mark.parametrize("num_threads", [2, 3])
@pytest.mark.parametrize("format_", FORMATS)
def test_threads_change_nothing(made, format_, num_threads) -> None:
    multiply = product(made, weight_in(format_, 700, 576), format_)
    for num_x in (1, 5, 40):
        assert num_x * 700 * 576 > MIN_PARALLEL
        x = random(num_x, 576)
        alone = multiply(x)[0]
        assert torch.get_num_threads() == 1
        torch.set_num_threads(num_threads)
        try:
            assert torch.equal(multiply(x)[0], alone)
        finally:
            torch.set_num_threads(1)


def test_several_matrices_in_one_call(made) -> None:
    weights = [random(n, 80, seed=n) for n in (5, 96, 1, 130)]
    biases = [None, random(96), None, random(130)]
    multiply = Product(made, [PackedWeight.pack(w, "float32") for w in weights], biases)
    for num_x in (1, 4, 33):
        x = random(num_x, 80)
        for out, weight, bias in zip(multiply(x), weights, biases, strict=True):
            assert out.is_contiguous()
            assert torch.equal(out, product(made, weight, "float32", bias)(x)[0])


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("num_x", [3, 40])
def test_nan_and_infinity_propagate(made, format_, num_x) -> None:
    levels = (random(10, 64).abs() * 5).round().clamp(max=14) + 1
    levels[:, ::GROUP], levels[:, 1::GROUP] = (127, 1) if format_ == "int8" else (16, 1)
    multiply = product(made, levels / 4, format_)
    x = random(num_x, 64)
    clean = multiply(x)[0]
    x[0, 63], x[1, 3] = torch.nan, -torch.inf
    found = multiply(x)[0]
    assert found[0].isnan().all() and (found[1] == -torch.inf).all()
    assert torch.equal(found[2:], clean[2:])
    x[1, 4] = torch.inf
    assert multiply(x)[0][1].isnan().all()


@pytest.mark.parametrize("format_", ["float32", "bfloat16"])
def test_nan_and_infinity_in_the_weights(made, format_) -> None:
    weight = weight_in("bfloat16", 8, 24)
    weight[2, 5], weight[7, 23] = torch.nan, torch.inf
    found = product(made, weight, format_)(torch.ones(2, 24))[0]
    assert found[:, 2].isnan().all() and (found[:, 7] == torch.inf).all()
    assert found[:, [0, 1, 3, 4, 5, 6]].isfinite().all()
    for format_ in ("int8", "int4"):
        with pytest.raises(InexactError):
            PackedWeight.pack(weight, format_)
    assert PackedWeight.exact(weight).format == "bfloat16"


def test_inputs_of_any_strides(made) -> None:
    weight = random(30, 48)
    multiply = product(made, weight, "float32")
    wide = random(6, 96)
    for x in (wide[:, ::2], wide[:, 48:], wide[::2, :48], wide[:1, :48].expand(5, 48), random(48, 6).T):
        assert torch.equal(multiply(x)[0], multiply(x.contiguous())[0])
    assert multiply(wide[:0, :48])[0].shape == (0, 30)
    with pytest.raises(ValueError, match="96 columns"):
        multiply(wide)


@pytest.mark.parametrize("format_", ["bfloat16", "int8", "int4"])
def test_pack_refuses_what_it_would_round(format_) -> None:
    with pytest.raises(InexactError, match=format_):
        PackedWeight.pack(random(3, 32), format_)


@pytest.mark.parametrize("format_", FORMATS)
def test_rows_are_those_of_the_matrix(format_) -> None:
    weight = weight_in(format_, 100, 70)
    packed = PackedWeight.pack(weight, format_)
    numbers = torch.tensor([99, 0, 3, 3, 50])
    assert torch.equal(packed.rows(numbers), packed.dense()[numbers])
    assert torch.equal(packed.dense(), weight)
    assert packed.rows(numbers[:0]).shape == (0, 70)


def test_int8_error_is_at_most_half_a_level() -> None:
    weight = random(64, 100)
    weight[5] = 0.0
    weight[6, :32] *= 1e-30
    padded = functional.pad(weight, (0, 28)).view(64, 4, 32)
    level = (padded.abs().amax(2) / 127).repeat_interleave(32, 1)[:, :100]
    dense = PackedWeight.pack(weight, "int8", can_round=True).dense()
    assert ((dense - weight).abs() <= level * 0.5001).all()
    relative = (dense - weight).norm() / weight.norm()
    assert relative < 0.006


def test_two_threads_at_once(made) -> None:
    multiply = product(made, weight_in("bfloat16", 600, 512), "bfloat16")
    inputs = [random(n, 512, seed=n) for n in (1, 2, 7, 40)]
    wanted = [multiply(x)[0] for x in inputs]
    wrong: list[int] = []
    barrier = threading.Barrier(3)

    def work(num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        barrier.wait()
        for _ in range(50):
            wrong.extend(i for i, x in enumerate(inputs) if not torch.equal(multiply(x)[0], wanted[i]))

    threads = [threading.Thread(target=work, args=(n,)) for n in (1, 2, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


class Block(nn.Module):
    """Two layers with one input, one with another, and a router too small to be rounded."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, 700, bias=False), nn.Linear(width, 800)
        self.down, self.router = nn.Linear(800, width), nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.sigmoid(self.gate(x))[..., :4] + self.router(x)
        return self.down(torch.relu(self.up(x))) * y.sum(-1, keepdim=True)


def block() -> Block:
    torch.manual_seed(0)
    return Block().eval().requires_grad_(False)


def test_layers_with_one_input_share_a_product() -> None:
    model, x = block(), random(2, 5, 96)
    wanted = model(x)
    report = accelerate(model, run=lambda m: m(x))
    assert (report.formats, report.num_products, report.reason) == ({"float32": 4}, 2, "")
    assert report.difference < 1e-5
    assert all(isinstance(m, FastLinear) for m in model.children())
    torch.testing.assert_close(model(x), wanted, rtol=1e-5, atol=1e-5)
    # Another tensor, and one changed in place since the last forward.
    torch.testing.assert_close(model(x + 1), block()(x + 1), rtol=1e-5, atol=1e-5)
    x.mul_(2)
    torch.testing.assert_close(model(x), block()(x), rtol=1e-5, atol=1e-5)
    # A layer of the group called alone, twice, out of order.
    for layer in ("up", "gate", "gate", "up", "router", "up"):
        found = getattr(model, layer)(x)
        torch.testing.assert_close(found, getattr(block(), layer)(x), rtol=1e-5, atol=1e-5)


def test_weights_can_still_be_read() -> None:
    model, x = block(), random(3, 96)
    accelerate(model, run=lambda m: m(x))
    up = model.up
    assert (up.weight.dtype, up.weight.shape, up.weight.device.type) == (torch.float32, (800, 96), "cpu")
    assert torch.equal(up.weight.clone(), block().up.weight)
    torch.testing.assert_close(functional.linear(x, up.weight, up.bias), up(x), rtol=1e-5, atol=1e-5)
    with pytest.raises(TypeError, match="cannot be changed"):
        up.weight.zero_()
    with pytest.raises(TypeError, match="float32"):
        up(x.double())
    with pytest.raises(TypeError, match="gradients"):
        up(x.clone().requires_grad_())
    again = copy.deepcopy(model)
    assert torch.equal(again(x), model(x))


def test_int8_leaves_small_matrices_exact() -> None:
    model, x = block(), random(3, 96)
    report = accelerate(model, weights="int8", run=lambda m: m(x))
    assert report.formats == {"int8": 3, "float32": 1}
    assert report.bytes_after < 0.3 * report.bytes_before
    assert 0 < report.difference < 0.05
    with pytest.raises(ValueError, match="int7"):
        accelerate(model, weights="int7")


@pytest.mark.parametrize("weights", ["float32", "int8"])
@pytest.mark.parametrize("family", ["Llama", "Gemma3Text"])
def test_tied_embeddings(tools, family, weights) -> None:
    own = tools.tiny_model(family, tie_word_embeddings=True, initializer_range=0.05).bfloat16().float()
    ids = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    model = copy.deepcopy(own)
    report = accelerate(model, weights=weights)
    embedding = model.get_input_embeddings().weight
    assert isinstance(embedding, LazyWeight) and embedding.packed.format == "bfloat16"
    assert report.formats == {"bfloat16": 29}
    assert report.bytes_after < 0.52 * report.bytes_before
    torch.testing.assert_close(model(input_ids=ids).logits, own(input_ids=ids).logits, rtol=1e-4, atol=1e-4)


def test_other_layers_stay() -> None:
    class Odd(nn.Linear):
        pass

    model = nn.ModuleList([Odd(8, 8), nn.Linear(8, 8).bfloat16(), nn.Linear(8, 8, device="meta")])
    report = accelerate(model, run=lambda _m: torch.zeros(1))
    assert report.reason and report.formats == {}
    assert [type(m) for m in model] == [Odd, nn.Linear, nn.Linear]


def test_a_model_that_does_not_run() -> None:
    with pytest.raises(EngineError, match="does not run"):
        accelerate(block())


def test_without_llvm(monkeypatch, caplog) -> None:
    monkeypatch.setattr(kernel_code, "kernels", Once(kernel_code._compile, "no kernels"))
    monkeypatch.setitem(sys.modules, "llvmlite", None)
    monkeypatch.setitem(sys.modules, "llvmlite.binding", None)
    model, x = block(), random(3, 96)
    with caplog.at_level(logging.INFO, logger=kernel_llvm.__name__):
        report = accelerate(model, run=lambda m: m(x))
        assert "llvmlite" in report.reason
        assert accelerate(model, run=lambda m: m(x)).reason == report.reason
    assert len(caplog.records) == 1
    assert type(model.up) is nn.Linear and torch.equal(model(x), block()(x))


def test_a_cpu_without_the_instructions(monkeypatch) -> None:
    monkeypatch.setattr(kernel_code, "kernels", Once(kernel_code._compile, "no kernels"))
    monkeypatch.setattr(kernel_llvm.platform, "machine", lambda: "riscv64")
    llvm = pytest.importorskip("llvmlite.binding")
    monkeypatch.setattr(llvm, "get_host_cpu_features", lambda: llvm.targets.FeatureMap())
    assert kernel_code.kernels() is None and "riscv64" in kernel_code.reason()
    assert kernels.accelerate(block()).reason == kernel_code.reason()


def test_without_openmp_one_thread_does_all(monkeypatch, made) -> None:
    class Nothing:
        pass

    weight, x = weight_in("float32", 400, 512), random(3, 512)
    monkeypatch.setattr(kernel_llvm.ctypes, "CDLL", lambda _name: Nothing())
    monkeypatch.setattr(kernel_code, "kernels", Once(kernel_code._compile, "no kernels"))
    serial = kernel_code.kernels()
    assert serial is not None
    torch.set_num_threads(2)
    try:
        assert torch.equal(product(serial, weight, "float32")(x)[0], product(made, weight, "float32")(x)[0])
    finally:
        torch.set_num_threads(1)


def test_bound_products_share_their_scratch_memory(made):
    product = Product(made, [PackedWeight.pack(weight_in("int4", 48, 64), "int4")], [None])
    num = kernel_code.UNPACK_FROM["int4"] + 3
    x = random(num, 64)
    first, second = torch.empty(num, 48), torch.empty(num, 48)
    calls = [product.bind(x, out) for out in (first, second)]
    assert len({call.__defaults__[0].data_ptr() for call in calls}) == 1
    for call in calls:
        call()
    [expected] = product(x)
    assert torch.equal(first, expected) and torch.equal(second, expected)


@pytest.mark.skipif(kernel_llvm.LANES == 8, reason="this CPU's vectors are the narrow ones")
def test_a_cpu_with_narrower_vectors_is_served_as_well():
    files = [
        str(Path(__file__).parent / f"test_{name}.py")
        for name in ("kernels", "kernel_attention", "kernel_norm", "chunk_attention")
    ]
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "avx2"}
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "1 skipped" in done.stdout  # this one
