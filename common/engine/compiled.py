"""torch.compile for the parts of a model that hold no state, as an option; falls back to the model as it is.

Whole layers are not compiled: the graph breaks at their state, and torch compiles each layer anew for minutes. On the
CPUs measured the option did not pay; it is there for devices where it does. Used by the runner.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from common.engine.kernels import relative_difference

log = logging.getLogger(__name__)

# Largest change of the model's output, relative to its range.
TOLERANCE = 1e-2


def compile_parts(model: nn.Module, run: Callable[[Any], torch.Tensor]) -> str:
    """Compile every part of a layer that has no state, in place; `run` computes some output of the model.

    Returns: empty, or why everything stays as it is (no compiler, for one); said in the log too.
    """
    parts = list(_parts(model))
    torch._dynamo.config.suppress_errors = False  # the reason is wanted
    try:
        before = _outputs(model, run)
        for part in parts:
            part.compile(dynamic=True)
        after = _outputs(model, run)
        is_same = relative_difference(before, after) <= TOLERANCE
        reason = "" if is_same else "the compiled parts give another result"
    except Exception as e:  # noqa: BLE001 - dynamo and its back ends raise whatever they like
        reason = f"{type(e).__name__}: {' '.join(str(e).split()[:30])}"
    finally:
        torch._dynamo.config.suppress_errors = True  # what cannot be compiled for later shapes runs as it is
    if reason:
        for part in parts:
            part._compiled_call_impl = None
        torch._dynamo.reset()
        log.warning("torch.compile failed, the model runs as it is: %s", reason)
    else:
        log.info("torch.compile compiled %d parts", len(parts))
    return reason


def _parts(model: nn.Module) -> Iterable[nn.Module]:
    """The largest parts of layers that know no layer number, by which all that have state find it."""
    for layers in (m for m in model.modules() if isinstance(m, nn.ModuleList)):
        for layer in layers:
            if any(hasattr(m, "layer_idx") for m in layer.modules()):
                yield from (c for c in layer.children() if not any(hasattr(m, "layer_idx") for m in c.modules()))


@torch.inference_mode()
def _outputs(model: nn.Module, run: Callable[[Any], torch.Tensor]) -> torch.Tensor:
    return run(model).float()
