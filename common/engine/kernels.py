"""Swaps a loaded model's linear layers for ones that read their weights once, at the memory's speed, on the CPU.

`accelerate` walks any torch model; it knows no model names, no scheduler and no slots. Layers that get the same input
become one product. Where the kernels cannot be made, or a layer is not float32 on the CPU, torch's own layer stays.
Call it once after loading, before anything keeps references to the weights; called by the runner's `load`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from common.engine import kernel_code
from common.engine.kernel_code import Kernels
from common.engine.kernel_product import Product
from common.engine.kernel_weights import PackedWeight
from common.engine.memory import trim
from common.errors import EngineError

# Largest change of the model's output, relative to its range.
TOLERANCE = {"float32": 1e-3, "int8": 0.3}
# Smaller matrices, a router's for one, cost no bandwidth and may decide much: never rounded to int8.
MIN_INT8_SIZE = 1 << 16
# Parameters up to this size are copied so that they do not hold the weights' file in memory.
_SMALL_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Report:
    """What `accelerate` did. `reason` is empty, or says why nothing was changed.

    Attributes:
        formats: number of layers by weight format.
        num_products: kernel calls per forward that serve them.
        bytes_before, bytes_after: memory of their weights.
        difference: of the model's output, relative to its range.
    """

    formats: dict[str, int] = field(default_factory=dict)
    num_products: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    difference: float = 0.0
    reason: str = ""


class LazyWeight(torch.Tensor):
    """Stands where code expects a layer's `weight`: has its shape and dtype, and its values once they are used."""

    packed: PackedWeight

    @staticmethod
    def __new__(cls, packed: PackedWeight) -> LazyWeight:
        shape = (packed.num_rows, packed.num_cols)
        made: LazyWeight = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32)
        made.packed = packed
        return made

    def __init__(self, packed: PackedWeight) -> None:
        super().__init__()

    def __deepcopy__(self, _memo: Any) -> LazyWeight:
        return self

    def __repr__(self, **_kwargs: Any) -> str:  # type: ignore[override]
        return f"LazyWeight({tuple(self.shape)}, {self.packed.format})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return args[0]
        if func is torch.ops.aten.embedding.default and isinstance(args[0], LazyWeight):
            ids = args[1]
            return args[0].packed.rows(ids.reshape(-1)).view(*ids.shape, args[0].shape[1])
        if func._schema.is_mutable and any(isinstance(a, LazyWeight) for a in args):
            raise TypeError(f"the weights of an accelerated layer cannot be changed ({func})")
        args, kwargs = tree_map(lambda a: a.packed.dense() if isinstance(a, LazyWeight) else a, (args, kwargs or {}))
        return func(*args, **kwargs)


class Shared:
    """Layers with one input: the first that is called computes all of them, the others take their result."""

    def __init__(self, product: Product) -> None:
        self._product = product
        self._left: tuple[torch.Tensor, dict[int, torch.Tensor]] | None = None

    def __deepcopy__(self, _memo: Any) -> Shared:
        return Shared(self._product)

    def take(self, x: torch.Tensor, index: int) -> torch.Tensor:
        """Result of layer `index` for x [..., K]. Each result is given out once; another x computes all anew."""
        # Read once: another thread may run the same model.
        left = self._left
        if left is not None and left[0] is x and (found := left[1].pop(index, None)) is not None:
            if not left[1]:
                self._left = None
            return found
        outs = self._product(x)
        if len(outs) > 1:
            self._left = (x, {i: out for i, out in enumerate(outs) if i != index})
        return outs[index]


class FastLinear(nn.Module):
    """In place of an nn.Linear: float32 on the CPU, inference only."""

    def __init__(self, shared: Shared, index: int, packed: PackedWeight, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.in_features, self.out_features = packed.num_cols, packed.num_rows
        self.weight, self.bias = LazyWeight(packed), bias
        self._shared, self._index = shared, index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x W^T + bias for x float32 [..., in_features].

        Raises:
            TypeError: x is of another dtype, on another device, or wants a gradient.
        """
        return self._shared.take(x, self._index)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, {self.weight.packed.format}"


def accelerate(
    model: nn.Module, *, weights: str = "float32", run: Callable[[Any], torch.Tensor] | None = None
) -> Report:
    """Swap every float32 nn.Linear on the CPU, the output layer and embeddings tied to it too, in place.

    `weights` "float32" changes no weight, but keeps each matrix in the smallest form that is exact; "int8" rounds those
    that are wider, 32 of a row to one scale. Each layer's original is dropped before the next is packed.
    `run` computes one output of the model; by default the logits of a few tokens.

    Raises:
        ValueError: `weights` is neither.
        EngineError: the model does not run, or its output changed by more than rounding explains.
    """
    if weights not in TOLERANCE:
        raise ValueError(f"weights {weights!r} is not one of {', '.join(TOLERANCE)}")
    made = kernel_code.kernels()
    if made is None:
        return Report(reason=kernel_code.reason())
    places = _places(model)
    if not places:
        return Report(reason="the model has no float32 linear layers on the CPU")
    calls: list[tuple[nn.Module, torch.Tensor]] = []
    before = _output(model, run or short_forward, places, calls)
    if not before.isfinite().all():
        raise EngineError("the model gives logits that are not finite numbers")
    swapped = _Swap(model, made, weights, places)
    for group in _groups(places, calls):
        swapped.group(group)
    calls.clear()
    _release(model)
    after = _output(model, run or short_forward)
    difference = relative_difference(before, after)
    if not difference <= TOLERANCE[weights]:
        raise EngineError(f"accelerated layers change this model's output by {difference:.2g} of its range")
    return swapped.report(difference)


class _Swap:
    """Swaps group after group and counts."""

    def __init__(self, model: nn.Module, made: Kernels, weights: str, places: dict[nn.Module, list[str]]) -> None:
        self._model, self._kernels, self._weights, self._places = model, made, weights, places
        self._embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding)]
        self._formats: Counter[str] = Counter()
        self._products = self._before = self._after = 0

    def group(self, layers: list[nn.Linear]) -> None:
        """Layers with one input become one product per format."""
        by_format: dict[str, list[tuple[nn.Linear, PackedWeight]]] = {}
        for layer in layers:
            packed = self._pack(layer)
            by_format.setdefault(packed.format, []).append((layer, packed))
        for members in by_format.values():
            biases = [None if layer.bias is None else layer.bias.detach() for layer, _ in members]
            shared = Shared(Product(self._kernels, [packed for _, packed in members], biases))
            self._products += 1
            for index, ((layer, packed), bias) in enumerate(zip(members, biases, strict=True)):
                fast = FastLinear(shared, index, packed, bias).eval()
                for name in self._places[layer]:
                    parent, _, last = name.rpartition(".")
                    setattr(self._model.get_submodule(parent), last, fast)
                del self._places[layer]

    def report(self, difference: float) -> Report:
        return Report(dict(self._formats), self._products, self._before, self._after, difference)

    def _pack(self, layer: nn.Linear) -> PackedWeight:
        weight = layer.weight.detach()
        own = packed = PackedWeight.exact(weight)
        is_wide = packed.format in ("bfloat16", "float32") and weight.numel() >= MIN_INT8_SIZE
        if self._weights == "int8" and is_wide and weight.isfinite().all():
            packed = PackedWeight.pack(weight, "int8", can_round=True)
        self._formats[packed.format] += 1
        self._before += weight.nbytes
        self._after += packed.data.nbytes
        tied = [m for m in self._embeddings if m.weight is layer.weight]
        if tied and own is not packed:  # embeddings stay exact
            self._after += own.data.nbytes
        for embedding in tied:
            del embedding.weight
            embedding.weight = LazyWeight(own)
        return packed


def _places(model: nn.Module) -> dict[nn.Module, list[str]]:
    """The layers to swap and all names they go by."""
    places: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        # Subclasses may compute something else.
        if type(module) is nn.Linear and name and _is_plain(module.weight):
            places.setdefault(module, []).append(name)
    return places


def _is_plain(weight: torch.Tensor) -> bool:
    is_float = weight.dtype == torch.float32 and weight.device.type == "cpu"
    return is_float and type(weight) is nn.Parameter and weight.numel() > 0


def _release(model: nn.Module) -> None:
    """Let go of the mapping of the weights' file, of which small parameters may be views, and of freed memory."""
    for parameter in model.parameters():
        if parameter.nbytes <= _SMALL_BYTES:
            parameter.data = parameter.data.clone()
    trim()


def _groups(places: dict[Any, list[str]], calls: list[tuple[nn.Module, torch.Tensor]]) -> Iterable[list[nn.Linear]]:
    """Layers of one parent that were called once each, with the same tensor object; all others alone."""
    times = Counter(id(layer) for layer, _ in calls)
    groups: dict[Any, list[nn.Linear]] = {}
    inputs = {id(layer): id(x) for layer, x in calls}
    for layer, names in places.items():
        is_plain = times[id(layer)] == 1 and len(names) == 1
        key = (names[0].rpartition(".")[0], inputs[id(layer)]) if is_plain else id(layer)
        groups.setdefault(key, []).append(layer)
    order = list(groups.values())
    groups.clear()
    while order:  # handed out one by one, so that each layer's weights can be freed
        yield order.pop(0)


def _output(
    model: nn.Module,
    run: Callable[[Any], torch.Tensor],
    layers: Iterable[nn.Module] = (),
    calls: list[tuple[nn.Module, torch.Tensor]] | None = None,
) -> torch.Tensor:
    """The output of `run`, float32; notes in `calls` which layer gets which tensor."""
    noted = calls if calls is not None else []
    hooks = [
        layer.register_forward_pre_hook(lambda m, args: noted.append((m, args[0])) if args else None)
        for layer in layers
    ]
    try:
        with torch.inference_mode():
            return run(model).float()
    except Exception as e:
        raise EngineError(f"the model does not run: {type(e).__name__}: {e}") from e
    finally:
        for hook in hooks:
            hook.remove()


def relative_difference(own: torch.Tensor, found: torch.Tensor) -> float:
    """The largest difference, relative to the range of `own`; NaN if either has one."""
    return float((own - found).abs().max()) / (float(own.max() - own.min()) or 1.0)


def short_forward(model: Any) -> torch.Tensor:
    """Logits of a few tokens, [1, 9, vocabulary]."""
    vocab_size = model.config.get_text_config().vocab_size
    ids = torch.tensor([[(7 * i + 1) % vocab_size for i in range(9)]], device=model.device)
    logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    return logits
