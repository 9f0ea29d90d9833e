"""The simulation can fail: every mistake of mutants.py is found, from seed 0 on, within so many seeds."""

from __future__ import annotations

import pytest

from tests.faultsim.draw import has_caches
from tests.faultsim.mutants import MUTANTS, OF_CACHES, broken
from tests.faultsim.scenario import simulate

MAX_SEEDS = 1500
LONG = (
    "half a piece counts as whole",
    "prompts are not hashed",
    "resend nothing after Resume",
    "segments are taken before Accepted",
)
"""What only some hundred seeds show: on the long list."""
BY_SCRIPT = ("a push is not repeated after Resume", "a peer that left is not forgotten")
"""Shown by a script in test_found.py."""


def found_at(name: str) -> int:
    """The first seed that shows it."""
    with broken(name):
        for seed in range(MAX_SEEDS):
            if (name not in OF_CACHES or has_caches(seed)) and simulate(seed).violation:
                return seed
    pytest.fail(f"{MAX_SEEDS} seeds did not show the mutant {name!r}")


@pytest.mark.parametrize("name", [name for name in MUTANTS if name not in LONG + BY_SCRIPT])
def test_mistake_is_found(name):
    seed = found_at(name)
    assert not simulate(seed).violation, "the seed shows the mistake, and nothing else"


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG)
def test_mistake_is_found_by_many_seeds(name):
    test_mistake_is_found(name)
