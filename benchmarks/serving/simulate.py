"""The simulator over the measured profiles: the same requests, the same variant, in virtual time.

Called by __main__.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

from benchmarks.serving.profile import Measured
from benchmarks.serving.site import Variant
from common.policy.routing import Rules
from common.sim.cluster import Cluster
from common.sim.site import Deployment
from common.sim.workload import SimRequest
from decoded.config import BatchConfig

# As the daemons are configured: tokens of a chunk on a CPU, admission at decoded and at prefilld.
CHUNK_TOKENS = 256
MAX_SHARING = (32, 16)
MAX_STRETCH = BatchConfig().max_stretch
# Within a site: nothing that one core of computing could fill.
NEAR_BPS, NEAR_RTT_S = 10e9, 1e-4


def deployment(measured: Measured, variant: Variant) -> Deployment:
    """One prefilld, and one decoded that computes prompts too."""
    return Deployment(
        measured.remote,
        measured.own,
        measured.state,
        1,
        0,
        1,
        NEAR_BPS if variant.is_near else measured.link_bps,
        NEAR_RTT_S if variant.is_near else measured.rtt_s,
        chunk_tokens=CHUNK_TOKENS,
        codec_ratio=measured.codec_ratio,
        does_local_prefill=True,
        max_stretch=MAX_STRETCH,
        measured_slowdown=measured.slowdown,
        measured_stretch=measured.stretch,
        max_sharing=MAX_SHARING,
        import_s=measured.import_s[0 if variant.is_near else 1],
        lead_s=(measured.own_lead_s, measured.remote_lead_s),
    )


def simulate(
    measured: Measured, variant: Variant, threshold_tokens: float, ttft_slo_s: float, requests: Sequence[SimRequest]
) -> list[SimRequest]:
    """Those requests again, done."""
    rules = Rules(variant.mode, threshold_tokens, 2, threshold_tokens)
    cluster = Cluster(deployment(measured, variant), rules, ttft_slo=lambda _: ttft_slo_s)
    return cluster.run([copy(one) for one in requests])
