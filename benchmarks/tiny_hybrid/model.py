"""The tiny hybrid model and its word-level tokenizer: configuration only, all code is transformers' own kimi_linear.

Three KDA layers, then one MLA layer without positions, dense MLPs. The order matters: what a name is bound to must be
known before the only attention layer looks that key up, so the recurrent layers cannot be bypassed.
Called by train.py and tests.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.models.kimi_linear import KimiLinearConfig, KimiLinearForCausalLM
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention

from benchmarks.tiny_hybrid import task

MAX_CONTEXT = 8192


def tiny_config() -> KimiLinearConfig:
    """About a million parameters."""
    return KimiLinearConfig(
        vocab_size=len(task.WORDS),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        mlp_layer_types=["dense"] * 4,
        linear_head_dim=32,
        linear_num_heads=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        initializer_range=0.08,  # about 1 / sqrt(hidden_size)
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        max_position_embeddings=MAX_CONTEXT,
        pad_token_id=task.WORD_IDS[task.PAD],
        bos_token_id=None,
        eos_token_id=task.WORD_IDS[task.END],
    )


def new_model(seed: int) -> KimiLinearForCausalLM:
    """A model with the random weights of a seed; its KDA heads begin with something to say, which saves minutes."""
    torch.manual_seed(seed)
    model = KimiLinearForCausalLM(tiny_config())
    with torch.no_grad():
        for layer in model.model.layers:
            if isinstance(layer.self_attn, KimiLinearDeltaAttention):
                _shape_heads(layer.self_attn)
    return model


def _shape_heads(kda: KimiLinearDeltaAttention) -> None:
    """The first head hands on the word before; the second recalls what followed the last occurrence of a word."""
    dim, current, before = kda.head_dim, -1, -2
    kda.k_proj.weight.copy_(kda.q_proj.weight)
    kda.conv1d.weight.mul_(0.1)
    taps = kda.conv1d.weight.squeeze(1).unflatten(0, (3, kda.num_heads, dim))  # [q k v, heads, channels, kernel]
    for part, first, second in ((0, current, current), (1, current, before), (2, before, current)):
        taps[part, 0, :, first] += 1.0
        taps[part, 1, :, second] += 1.0
    kda.forget_gate.A_log.zero_()  # slow: half of what is written is left after 7 to 700 words


def save_tokenizer(folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json: words are separated by white space, no word is added."""
    backend = Tokenizer(models.WordLevel(task.WORD_IDS, unk_token=task.UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=task.PAD,
        eos_token=task.END,
        unk_token=task.UNKNOWN,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_CONTEXT,
    ).save_pretrained(folder)
