"""Model families with tiny seeded random weights, and the size of their state as it follows from their configuration.

The formulas here are written from the families' papers and configurations, not from the engine's layout: a test
compares the two. One StateRow per (layer, kind), in units of elements.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

BASE = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    # Large weights and untied embeddings: every token of the prompt then matters to the outcome.
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
WINDOW = 16
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
MLA = {
    "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
    "num_key_value_heads": 4, "head_dim": 8,
}  # fmt: skip
DELTA = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
KDA = {"linear_head_dim": 16, "linear_num_heads": 4, "linear_conv_kernel_dim": 4}
LINEAR, FULL, SLIDING = "linear_attention", "full_attention", "sliding_attention"


@dataclass(frozen=True)
class StateRow:
    """Elements of one layer's state: per token for rows, of the whole for `recurrent`."""

    kind: str
    elements: int
    window: int = 0


def gqa(c: Any, kv_heads: int = 0, v_dim: int = 0) -> StateRow:
    """K and V of grouped-query attention."""
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    return StateRow("full", (kv_heads or c.num_key_value_heads) * (head_dim + (v_dim or head_dim)))


def sliding(c: Any, **sizes: int) -> StateRow:
    """The same in a window."""
    return StateRow("window", gqa(c, **sizes).elements, c.sliding_window)


def mla(c: Any) -> StateRow:
    """The compressed latent and the shared rotated key (DeepSeek-V2, arXiv 2405.04434, table 1)."""
    return StateRow("latent", c.kv_lora_rank + c.qk_rope_head_dim)


def kda(c: Any) -> StateRow:
    """Kimi delta attention: the last inputs of q, k, v convolutions and a matrix per head (arXiv 2510.26692)."""
    heads, dim = c.linear_num_heads, c.linear_head_dim
    return StateRow("recurrent", 3 * heads * dim * c.linear_conv_kernel_dim + heads * dim * dim)


def lightning(c: Any) -> StateRow:
    """As kda, with the head sizes of the softmax layers."""
    return kda(c)


def gated_delta(c: Any) -> StateRow:
    """Gated delta net (arXiv 2412.06464)."""
    keys = c.linear_num_key_heads * c.linear_key_head_dim
    values = c.linear_num_value_heads * c.linear_value_head_dim
    conv = (2 * keys + values) * c.linear_conv_kernel_dim
    return StateRow("recurrent", conv + c.linear_num_value_heads * c.linear_key_head_dim * c.linear_value_head_dim)


def ssd(heads: int, head_dim: int, groups: int, state: int, kernel: int) -> StateRow:
    """Mamba 2 (arXiv 2405.21060)."""
    inner = heads * head_dim
    return StateRow("recurrent", (inner + 2 * groups * state) * kernel + inner * state)


def short_conv(c: Any) -> StateRow:
    """LFM2's gated short convolution: inputs only."""
    return StateRow("recurrent", c.hidden_size * c.conv_L_cache)


def granite_ssd(c: Any) -> StateRow:
    """Granite and Falcon name their Mamba sizes alike."""
    return ssd(c.mamba_n_heads, c.mamba_d_head, c.mamba_n_groups, c.mamba_d_state, c.mamba_d_conv)


def by_type(kinds: dict[str, Callable[[Any], StateRow]]) -> Callable[[Any], list[StateRow]]:
    """Formula of a model whose layers differ by layer_types."""
    return lambda c: [kinds[t](c) for t in c.layer_types if t in kinds]


def every(*kinds: Callable[[Any], StateRow]) -> Callable[[Any], list[StateRow]]:
    """Formula of a model whose layers are all alike; several kinds are one layer's."""
    return lambda c: [kind(c) for _ in range(c.num_hidden_layers) for kind in kinds]


@dataclass(frozen=True)
class Family:
    """A transformers config class `{name}Config`, its extra settings, and the formula of its state.

    `refused` is part of the reason that the engine must give instead of serving it. `published` names a model and the
    settings of its state, where the class's defaults are no published model's.
    """

    name: str
    known_as: str
    formula: Callable[[Any], list[StateRow]]
    extra: dict[str, Any] = field(default_factory=dict)
    refused: str = ""
    published: tuple[str, dict[str, Any]] = ("class default", {})

    def config(self) -> Any:
        """The tiny configuration."""
        return getattr(transformers, f"{self.name}Config")(**(BASE | self.extra))

    def published_config(self) -> Any:
        """A configuration of the size that people use."""
        return getattr(transformers, f"{self.name}Config")(**self.published[1])

    def model(self) -> Any:
        """The tiny model; the same one every time."""
        torch.manual_seed(0)
        model_class = getattr(transformers, f"{self.name.removesuffix('Text')}ForCausalLM")
        return model_class(self.config()).eval().requires_grad_(False)


def pattern(text: str, **kinds: str) -> list[str]:
    """Layer types, a letter each."""
    return [kinds[letter] for letter in text]


GEMMA3_270M = {
    "num_hidden_layers": 18, "layer_types": pattern("sssssf" * 3, s=SLIDING, f=FULL), "sliding_window": 512,
    "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256,
}  # fmt: skip
LFM2_1B = {
    "num_hidden_layers": 16, "hidden_size": 2048, "layer_types": pattern("ccfccfccfcfcfcfc", c="conv", f=FULL),
}  # fmt: skip
GRANITE_H_SMALL = {
    "num_hidden_layers": 40, "layer_types": pattern("mmmmmfmmmm" * 4, m=LINEAR, f=FULL), "mamba_d_state": 128,
    "num_key_value_heads": 8,
}  # fmt: skip
NEMOTRON_H_8B = {
    "layer_types": pattern("mpmpmpmfpmpmpmpmpmfpmpmpmpmpmfpmpmpmpmpmfpmpmpmpmpmp", m=LINEAR, p="mlp", f=FULL),
}  # fmt: skip
MIXED = {"layer_types": [LINEAR, LINEAR, FULL, LINEAR]}
FAMILIES = {
    f.name: f
    for f in (
        Family(
            "KimiLinear", "Kimi Linear (KDA + MLA)", by_type({LINEAR: kda, FULL: mla}),
            MLA | MIXED | KDA | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        ),
        Family(
            "BailingHybrid", "Ring-2.5 (lightning + MLA)", by_type({LINEAR: lightning, FULL: mla}),
            MLA | MIXED | MOE | {"num_experts": 4, "n_group": 1, "topk_group": 1},
        ),
        Family("Qwen3_5Text", "Qwen3.5 (gated delta net + GQA)", by_type({LINEAR: gated_delta, FULL: gqa}), DELTA),
        Family(
            "Qwen3Next", "Qwen3-Next (gated delta net + GQA, MoE)", by_type({LINEAR: gated_delta, FULL: gqa}),
            DELTA | MOE | {"num_experts": 4, "shared_expert_intermediate_size": 32},
        ),
        Family(
            "MiMoV2Flash", "MiMo-V2-Flash (sliding + GQA, sinks)",
            by_type({
                FULL: lambda c: gqa(c, v_dim=c.v_head_dim),
                SLIDING: lambda c: sliding(c, kv_heads=2 * c.num_key_value_heads, v_dim=c.v_head_dim),
            }),
            MOE | {"n_routed_experts": 4, "sliding_window": WINDOW, "v_head_dim": 12},
        ),
        Family("MiniMaxM2", "MiniMax-M2 (GQA, MoE)", every(gqa), MOE | {"num_local_experts": 4}),
        Family("Qwen3Moe", "Qwen3 MoE (GQA)", every(gqa), MOE | {"num_experts": 4}),
        Family(
            "MiniMax", "MiniMax-01 (lightning + GQA)", every(gqa), MOE | {"num_local_experts": 4},
            refused="MiniMax uses cache of its own",
        ),
        Family(
            "DeepseekV3", "DeepSeek-V3 (MLA, MoE)", every(mla),
            MLA | MOE | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
        ),
        Family(
            "GptOss", "gpt-oss (sliding + full, sinks)", by_type({FULL: gqa, SLIDING: sliding}),
            MOE | {"num_local_experts": 4, "sliding_window": WINDOW},
        ),
        Family(
            "Gemma3Text", "Gemma 3 (sliding + full)", by_type({FULL: gqa, SLIDING: sliding}),
            {"layer_types": [SLIDING, SLIDING, FULL, SLIDING], "sliding_window": WINDOW, "query_pre_attn_scalar": 16},
            published=("Gemma 3 270M", GEMMA3_270M),
        ),
        Family(
            "Lfm2", "LFM2 (short convolutions + GQA)", by_type({"conv": short_conv, FULL: gqa}),
            {"block_ff_dim": 96, "layer_types": ["conv", FULL, "conv", "conv"]},
            published=("LFM2 1.2B", LFM2_1B),
        ),
        Family(
            "FalconH1", "Falcon-H1 (Mamba 2 and GQA in every layer)", every(granite_ssd, gqa),
            {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 16},
        ),
        Family(
            "GraniteMoeHybrid", "Granite 4 (Mamba 2 + GQA)", by_type({LINEAR: granite_ssd, FULL: gqa}),
            {
                "num_local_experts": 0, "shared_intermediate_size": 64, "layer_types": [LINEAR, FULL, LINEAR, LINEAR],
                "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16,
            },
            published=("Granite 4.0 H Small", GRANITE_H_SMALL),
        ),
        Family(
            "NemotronH", "Nemotron-H (Mamba 2 + GQA + MLP layers)",
            by_type({
                LINEAR: lambda c: ssd(c.mamba_num_heads, c.mamba_head_dim, c.n_groups, c.ssm_state_size, c.conv_kernel),
                FULL: gqa,
            }),
            MOE | {
                "layer_types": [LINEAR, "moe", FULL, LINEAR], "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2,
                "ssm_state_size": 16, "chunk_size": 16, "n_routed_experts": 4,
                "moe_shared_expert_intermediate_size": 32,
            },
            published=("Nemotron-H 8B", NEMOTRON_H_8B),
        ),
        Family(
            "Mamba2", "Mamba 2",
            every(lambda c: ssd(c.num_heads, c.head_dim, c.n_groups, c.state_size, c.conv_kernel)),
            {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "chunk_size": 16},
        ),
        Family("Llama", "Llama 2 to 3.3, SmolLM2 (GQA)", every(gqa)),
        Family("Mistral", "Mistral (sliding)", every(sliding), {"sliding_window": WINDOW}),
    )
}  # fmt: skip
