"""A path that loses nine tenths of its rate in mid-run: routing follows, and comes back."""

from __future__ import annotations

import pytest

from benchmarks.linkcut import run

pytestmark = [pytest.mark.wan, pytest.mark.slow]


@pytest.mark.parametrize("mode", ["adaptive", "threshold"])
def test_routing_follows_a_path_that_becomes_narrow_and_wide_again(mode: str) -> None:
    before, _, cut, _, restored = phases = run(mode, 60.0, 1.5, 40.0, 100.0, 180.0)
    told = "\n".join(phase.line() for phase in phases)
    assert cut.offloaded < 0.6 * before.offloaded, told
    assert cut.p95_s <= 1.05 * cut.local_p95_s, told
    assert restored.offloaded > 1.3 * cut.offloaded, told
    assert restored.p95_s < restored.local_p95_s, told
