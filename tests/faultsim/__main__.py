"""Fault simulation from the command line.

    python -m tests.faultsim 4711                  one seed, exactly as it was: what was violated, and its trace's end
    python -m tests.faultsim 4711 --events 1000    more of its trace
    python -m tests.faultsim 0:10000               many seeds: what happened how often, and every violation
    python -m tests.faultsim 0:500 --mutant NAME   the same with a part of the product broken on purpose (mutants.py)

Exit status 1 when a rule was violated.
"""

from __future__ import annotations

import argparse
import contextlib
import sys

from tests.faultsim.campaign import report, run
from tests.faultsim.mutants import MUTANTS, broken
from tests.faultsim.scenario import simulate


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.faultsim", description="Deterministic faults, see the package."
    )
    parser.add_argument("seeds", help="one seed, FIRST:STOP or FIRST:STOP:STEP")
    parser.add_argument("--events", type=int, default=60, metavar="N", help="length of the trace that is shown")
    parser.add_argument("--json", action="store_true", help="one line for a program")
    parser.add_argument("--mutant", choices=MUTANTS, metavar="NAME", help="break this on purpose")
    args = parser.parse_args()
    numbers = [int(part) for part in args.seeds.split(":")]
    with broken(args.mutant) if args.mutant else contextlib.nullcontext():
        if len(numbers) == 1:
            result = simulate(numbers[0])
            if result.violation:
                print(report(numbers[0], result, args.events))
            else:
                print(result.world.tail(args.events))
                print(
                    f"seed {numbers[0]}: every rule held in {result.num_steps} steps, trace {result.world.trace_hash}"
                )
            return bool(result.violation)
        campaign = run(range(*numbers))
        if args.json:
            print(campaign.to_json())
            return bool(campaign.failures)
        print(campaign.table())
        for seed in campaign.failures:
            print("\n" + report(seed, simulate(seed), args.events))
        return bool(campaign.failures)


if __name__ == "__main__":
    sys.exit(main())
