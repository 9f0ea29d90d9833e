"""The paper's numbers, and what follows from them: Tables 3, 5 and 6 (arXiv 2604.15039). Data and small sums only."""

from __future__ import annotations

GBPS, MIB_BITS = 1e9, 8 * 2**20

# Table 6: way -> (throughput, mean and P90 TTFT, threshold, Np, Nd). Printed to two decimals.
TABLE_6 = {
    "prfaas": (3.24, 2.22, 3.51, 19_400, 3, 5),
    "homogeneous": (2.11, 4.44, 9.73, None, 9, 3),
    "naive": (2.45, 1.74, 3.51, 0, 0, 8),
}
EGRESS_BPS = 13e9

# Table 5, the 1T hybrid on 8 x H200: thousand tokens -> (MiB of state, seconds, Gbit/s).
TABLE_5 = {1: (190.8, 0.44, 3.61), 8: (308.9, 0.72, 3.59), 32: (701.3, 1.84, 3.19), 128: (2316.3, 7.40, 2.62)}

# Table 3: KV throughput in Gbit/s of one instance at 1K, 8K, 32K, 128K.
TABLE_3 = {
    "Kimi Linear": (1.19, 2.29, 3.87, 4.88),
    "MiMo-V2-Flash": (0.82, 2.85, 4.66, 4.71),
    "Qwen3.5-397B": (4.13, 6.28, 8.25, 7.47),
    "Ring-2.5-1T": (7.27, 4.47, 2.59, 1.46),
    "MiniMax-M2.5": (4.94, 32.87, 59.93, 47.82),
    "Qwen3-235B": (4.12, 22.42, 33.35, 21.50),
}
AT_32K, AT_128K = 2, 3
NUM_INSTANCES = 512 // 8


def kv_throughput_gbps(megabytes: float, seconds: float) -> float:
    """Equation (1)."""
    return megabytes * MIB_BITS / seconds / GBPS


def cluster_egress_gbps(model: str, at: int, num_instances: float = NUM_INSTANCES) -> float:
    """Equation (2) for 512 GPUs, eight to an instance."""
    return num_instances * TABLE_3[model][at]


def hybrid_state_mib(num_tokens: int) -> float:
    """The 1T hybrid's state from its architecture: 42 KDA layers (64 heads of 128 x 128 in float32, three convolutions
    of four taps that keep three inputs) and 15 MLA layers (576 values of two bytes a token).
    """
    recurrent = 42 * (64 * 128 * 128 * 4 + 3 * 3 * 64 * 128 * 2)
    return (recurrent + 15 * 576 * 2 * num_tokens) / 2**20
