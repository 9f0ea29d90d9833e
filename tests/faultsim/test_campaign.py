"""10,000 seeds in which every rule holds and everything that may happen has happened; 200,000 on the long list.

A failing seed is shown with the step and the end of its trace; `python -m tests.faultsim SEED` has it again.
"""

from __future__ import annotations

import os
import time

import pytest

from tests.faultsim.campaign import report, run_in_processes
from tests.faultsim.scenario import simulate


def check(first: int, num_seeds: int) -> None:
    num_processes = min(2, len(os.sched_getaffinity(0)))
    began = time.monotonic()
    campaign = run_in_processes(first, first + num_seeds, num_processes)
    print(f"{num_processes} processes, {time.monotonic() - began:.0f} s; {campaign.table()}")
    for seed in sorted(campaign.failures):
        print(report(seed, simulate(seed), 60))
    assert not campaign.failures, f"seeds {sorted(campaign.failures)}: {campaign.failures}"
    assert campaign.num_seeds == num_seeds
    assert not campaign.missing(), f"never happened: {campaign.missing()}"


def test_ten_thousand_seeds():
    check(0, 10_000)


@pytest.mark.slow
def test_two_hundred_thousand_seeds():
    check(10_000, 200_000)
