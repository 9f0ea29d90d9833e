"""A seed is a run: the same again in this process, in another one, with other hashes, and from the command line."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.faultsim.campaign import ROOT, run
from tests.faultsim.scenario import simulate

SEEDS = range(300, 340)


def command(*args: str, hash_seed: str = "0") -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONHASHSEED": hash_seed}
    return subprocess.run(
        [sys.executable, "-m", "tests.faultsim", *args], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120
    )


def hash_of(run: subprocess.CompletedProcess[str]) -> str:
    found = re.search(r"trace ([0-9a-f]{32})", run.stdout)
    assert found, run.stdout + run.stderr
    return found[1]


def test_the_same_seed_gives_the_same_trace_whatever_ran_before():
    first = [simulate(seed).world.trace_hash for seed in SEEDS]
    assert len(set(first)) == len(first)
    again = [simulate(seed).world.trace_hash for seed in reversed(SEEDS)]
    assert again[::-1] == first


@pytest.mark.parametrize("hash_seed", ["1", "4711"])
def test_another_process_with_other_hashes_gives_the_same_trace(hash_seed):
    for seed in SEEDS[::20]:
        assert hash_of(command(f"{seed}", hash_seed=hash_seed)) == simulate(seed).world.trace_hash


def test_a_failing_seed_says_how_to_have_it_again_and_is_the_same_then():
    mutant = ["--mutant", "a slot is never given back"]
    campaign = command("0:3", *mutant, "--events", "20")
    assert campaign.returncode == 1
    failing = re.search(r"seed (\d+), step (\d+): (.*)\n", campaign.stdout)
    assert failing and f"python -m tests.faultsim {failing[1]}" in campaign.stdout
    assert len(re.findall(r"^ *\d+ +\d+\.\d{6}  ", campaign.stdout, re.MULTILINE)) >= 20, "the tail of the trace"
    again = command(failing[1], *mutant, hash_seed="9")
    assert again.returncode == 1 and failing[0] in again.stdout
    assert hash_of(again) == hash_of(campaign)


def test_seeds_differ_in_what_happens():
    campaign = run(range(400, 440))
    assert not campaign.failures
    assert len({name for name in campaign.counts if name.startswith("fault: ")}) > 10
