"""The optimiser: Muon for weight matrices inside the layers, Adam for embeddings, norms, convolutions and gates.

Muon moves a matrix by the orthogonal factor of its averaged gradient, found by a few steps of a polynomial iteration;
on this task it learns in a fraction of the steps that Adam needs. Matrices of one shape are done together.
Called by train.py.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

MATRIX_RATE, OTHER_RATE = 0.02, 0.004
MOMENTUM, DECAY, ITERATIONS = 0.95, 0.01, 4
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of Muon's authors: fast near 0, never above about 1.2


class Muon:
    """Updates the parameters of one model in place."""

    def __init__(self, model: nn.Module) -> None:
        named = dict(model.named_parameters())
        inner = {n: p for n, p in named.items() if p.ndim == 2 and "embed" not in n and "lm_head" not in n}
        self._shapes: dict[tuple[int, int], list[nn.Parameter]] = {}
        for parameter in inner.values():
            self._shapes.setdefault((min(parameter.shape), max(parameter.shape)), []).append(parameter)
        self._momentum = {p: torch.zeros_like(p) for p in inner.values()}
        others = [p for n, p in named.items() if n not in inner]
        self._adam = torch.optim.AdamW(others, lr=0.0, betas=(0.9, 0.98), weight_decay=0.0)

    def step(self, rate: float) -> None:
        """Apply the gradients, at `rate` (0 to 1) of the full learning rates, and drop them."""
        for group in self._adam.param_groups:
            group["lr"] = OTHER_RATE * rate
        self._adam.step()
        with torch.no_grad():
            for parameters in self._shapes.values():
                moving = [(p, p.grad) for p in parameters if p.grad is not None]
                if moving:
                    moves = orthogonal(torch.stack([self._direction(p, gradient) for p, gradient in moving]))
                    for (parameter, _), move in zip(moving, moves, strict=True):
                        _apply(parameter, move, MATRIX_RATE * rate)
        self._adam.zero_grad()
        for parameter in self._momentum:
            parameter.grad = None

    def _direction(self, parameter: nn.Parameter, gradient: Tensor) -> Tensor:
        """Nesterov momentum, lying on its side."""
        average = self._momentum[parameter].mul_(MOMENTUM).add_(gradient)
        direction = gradient.add(average, alpha=MOMENTUM)
        return direction if parameter.shape[0] <= parameter.shape[1] else direction.T


def orthogonal(matrices: Tensor) -> Tensor:
    """About the nearest semi-orthogonal matrix of each [rows, columns], rows <= columns."""
    a, b, c = COEFFICIENTS
    x = matrices / (matrices.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def _apply(parameter: nn.Parameter, move: Tensor, rate: float) -> None:
    rows, columns = parameter.shape
    move = move if rows <= columns else move.T
    parameter.mul_(1 - rate * DECAY).add_(move, alpha=-rate * max(1.0, rows / columns) ** 0.5)
