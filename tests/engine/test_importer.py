"""Importing GGUF files and Hugging Face directories: exact weights, whole tokenizers, atomic and repeatable."""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf.quants import quantize
from safetensors.torch import load_file, save_file

from common.engine import importer
from common.engine.importer import ImportRefused, import_model
from common.engine.loader import load_model, verify_model_dir
from common.engine.manifest import model_digests
from common.errors import StartupError

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 64, 2, 4, 2, 16, 262
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>", "he", "ll"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
GGUF_NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "input_layernorm": "attn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
LLAMA_NORMS = {"post_attention_layernorm": "ffn_norm"}
GEMMA_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def byte_alphabet() -> list[str]:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return list(bytes_to_unicode().values())


def tiny_model(family: str, **extra: Any) -> Any:
    """Random, repeatable; norm weights are multiples of 1/64, so that adding and taking 1 is exact."""
    torch.manual_seed(1)
    sizes = {
        "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 96, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
        "max_position_embeddings": 512, "initializer_range": 0.3,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "tie_word_embeddings": True,
    }  # fmt: skip
    config = getattr(transformers, f"{family}Config")(**(sizes | extra))
    model = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.copy_(torch.randint(-16, 64, parameter.shape) / 64)
    return model


def tiny_llama(**extra: Any) -> Any:
    return tiny_model("Llama", rms_norm_eps=1e-5, **extra)


def tiny_gemma(**extra: Any) -> Any:
    return tiny_model("Gemma3Text", sliding_window=8, query_pre_attn_scalar=256, rms_norm_eps=1e-6, **extra)


def paired_rows(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama's GGUF order: the two halves of a head's rotary dimensions interleaved."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path: Path, model: Any, *, block: gguf.GGMLQuantizationType | None = None, skip: str = "") -> None:
    """A GGUF file of a tiny llama or gemma3, as the converters of that format lay it out."""
    is_gemma = model.config.model_type == "gemma3_text"
    arch = "gemma3" if is_gemma else "llama"
    config = model.config
    w = gguf.GGUFWriter(path, arch)
    w.add_name("tiny")
    w.add_context_length(config.max_position_embeddings)
    w.add_embedding_length(HIDDEN)
    w.add_block_count(LAYERS)
    w.add_feed_forward_length(96)
    w.add_head_count(HEADS)
    w.add_head_count_kv(KV_HEADS)
    w.add_layer_norm_rms_eps(config.rms_norm_eps)
    w.add_rope_freq_base(1e6 if is_gemma else 10000.0)
    if is_gemma:
        w.add_key_length(HEAD_DIM)
        w.add_value_length(HEAD_DIM)
        w.add_sliding_window(config.sliding_window)
    else:
        w.add_rope_dimension_count(HEAD_DIM)
        w.add_vocab_size(VOCAB)
    add_tokenizer(w)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" or (skip and skip in name):
            continue
        data = tensor.numpy()
        if is_gemma and "norm" in name:
            data = data + 1
        if not is_gemma and "q_proj" in name:
            data = paired_rows(data, HEADS)
        if not is_gemma and "k_proj" in name:
            data = paired_rows(data, KV_HEADS)
        if block is not None and data.ndim == 2:
            w.add_tensor(gguf_name(name, is_gemma), quantize(data, block), raw_dtype=block)
        else:
            w.add_tensor(gguf_name(name, is_gemma), np.ascontiguousarray(data))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def add_tokenizer(w: gguf.GGUFWriter) -> None:
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("smollm")
    w.add_token_list(SPECIALS[:4] + byte_alphabet() + SPECIALS[4:])
    w.add_token_types([3] * 4 + [1] * 258)
    w.add_token_merges(["h e", "l l"])
    w.add_bos_token_id(1)
    w.add_eos_token_id(2)
    w.add_pad_token_id(2)
    w.add_unk_token_id(3)
    w.add_add_bos_token(False)
    w.add_chat_template(TEMPLATE)


def gguf_name(name: str, is_gemma: bool) -> str:
    table = GGUF_NAMES | (GEMMA_NORMS if is_gemma else LLAMA_NORMS)
    if name == "model.embed_tokens.weight":
        return "token_embd.weight"
    if name == "model.norm.weight":
        return "output_norm.weight"
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{table[rest.removesuffix('.weight')]}.weight"


def write_hf(path: Path, model: Any, *, shards: bool = False) -> Path:
    """A Hugging Face directory with a byte-level tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = {token: n for n, token in enumerate(SPECIALS[:4] + byte_alphabet() + SPECIALS[4:])}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[("h", "e"), ("l", "l")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", unk_token="<unk>")
    fast.chat_template = TEMPLATE
    model.save_pretrained(path, max_shard_size="40KB" if shards else "5GB")
    fast.save_pretrained(path)
    return path


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    return write_hf(tmp_path / "hf", tiny_llama())


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.arange(4, 44)[None]).logits


# -- GGUF ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [tiny_llama, tiny_gemma])
def test_gguf_in_float32_gives_the_original_model(tmp_path: Path, make: Any) -> None:
    """Every tensor, the rotary order, the norms and the config: the logits are equal bit for bit."""
    model = make()
    write_gguf(tmp_path / "tiny.gguf", model)
    manifest = import_model(tmp_path / "tiny.gguf", tmp_path / "served")
    back = load_model(tmp_path / "served", attn_implementation="eager")
    model.set_attn_implementation("eager")
    assert torch.equal(logits(back.model), logits(model))
    saved = load_file(tmp_path / "served" / "model.safetensors")
    assert {t.dtype for t in saved.values()} == {torch.float32}
    assert "lm_head.weight" not in saved
    assert manifest.name == "served"
    assert back.eos_token_ids == (2,)
    assert (back.vocab_size, back.max_context) == (VOCAB, 512)


def test_gguf_blocks_are_dequantised_exactly(tmp_path: Path) -> None:
    """Q8_0 by its definition: 32 signed bytes times one half-precision scale."""
    model = tiny_llama()
    write_gguf(tmp_path / "tiny.gguf", model, block=gguf.GGMLQuantizationType.Q8_0)
    import_model(tmp_path / "tiny.gguf", tmp_path / "served")
    saved = load_file(tmp_path / "served" / "model.safetensors")
    for name in ("mlp.down_proj", "self_attn.v_proj", "self_attn.q_proj"):
        full = f"model.layers.1.{name}.weight"
        source = model.state_dict()[full].numpy()
        rows = quantize(source, gguf.GGMLQuantizationType.Q8_0).reshape(source.shape[0], -1, 34)
        scale = rows[..., :2].copy().view(np.float16).astype(np.float32)
        expected = (rows[..., 2:].view(np.int8).astype(np.float32) * scale).reshape(source.shape)
        assert np.array_equal(saved[full].numpy(), expected), name


def test_gguf_tokenizer_and_chat_template(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny_llama())
    import_model(tmp_path / "tiny.gguf", tmp_path / "served")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "served")
    assert tokenizer.encode("<|im_start|>") == [1]
    assert tokenizer.encode("hello") == [260, 261, tokenizer.convert_tokens_to_ids("o")]
    text = "naïve\t12 日本 🙂\r\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "he"}], return_dict=False)
    assert chat == [1, 260, 2]
    assert tokenizer.eos_token_id == 2


def test_two_imports_are_equal_byte_for_byte(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny_llama())
    a = import_model(tmp_path / "tiny.gguf", tmp_path / "a", name="tiny")
    b = import_model(tmp_path / "tiny.gguf", tmp_path / "b", name="tiny")
    assert a == b
    assert (tmp_path / "a/manifest.json").read_bytes() == (tmp_path / "b/manifest.json").read_bytes()


def test_gguf_without_a_needed_tensor_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny_llama(), skip="layers.1.mlp.up_proj")
    with pytest.raises(StartupError, match=r"tiny\.gguf lacks the tensor 'model\.layers\.1\.mlp\.up_proj\.weight'"):
        import_model(tmp_path / "tiny.gguf", tmp_path / "served")
    assert names(tmp_path) == ["tiny.gguf"]


def test_truncated_gguf_is_refused(tmp_path: Path) -> None:
    """By the tensor that is not there, or as a header that does not end."""
    path = tmp_path / "tiny.gguf"
    write_gguf(path, tiny_llama())
    whole = path.read_bytes()
    for keep in (4, 20, 3000, len(whole) - 5000):
        path.write_bytes(whole[:keep])
        why = rf"tensor '[\w.]+' ends at {len(whole)}\.$" if keep > 3000 else "and its header does not end in them"
        with pytest.raises(StartupError, match=rf"tiny\.gguf is not whole: {keep} bytes, {why}"):
            import_model(path, tmp_path / "served")
    assert names(tmp_path) == ["tiny.gguf"]


def test_gguf_header_of_nonsense_is_refused(tmp_path: Path) -> None:
    """Declared counts and sizes reserve nothing."""
    path = tmp_path / "odd.gguf"
    huge = (1 << 60).to_bytes(8, "little")
    for body, why in (
        (b"\x09\0\0\0" + bytes(16), "its version is 9"),
        (b"\x03\0\0\0" + huge + huge, "its header does not end"),
        (b"\x03\0\0\0" + bytes(8) + b"\x01" + bytes(7) + b"\x01" + bytes(7) + b"k\x63\0\0\0", "unknown type 99"),
    ):
        path.write_bytes(b"GGUF" + body)
        with pytest.raises(StartupError, match=why):
            import_model(path, tmp_path / "served")


@pytest.mark.parametrize("name", ["blk.2.attn_norm.weight", "blk.0.attn_q.bias", "rope_freqs.weight"])
def test_gguf_tensor_without_a_place_is_refused(tmp_path: Path, name: str, monkeypatch: Any) -> None:
    """transformers drops such; the model would be another one."""
    write = gguf.GGUFWriter.write_header_to_file

    def with_one_more(w: gguf.GGUFWriter) -> None:
        w.add_tensor(name, np.ones(HIDDEN, np.float32))
        write(w)

    monkeypatch.setattr(gguf.GGUFWriter, "write_header_to_file", with_one_more)
    write_gguf(tmp_path / "tiny.gguf", tiny_llama())
    with pytest.raises(StartupError, match=rf"tiny\.gguf: the weights have 1 tensor .* no place for: {name}[.;]"):
        import_model(tmp_path / "tiny.gguf", tmp_path / "served")


def test_unknown_architecture_is_refused(tmp_path: Path) -> None:
    w = gguf.GGUFWriter(tmp_path / "odd.gguf", "nosuchmodel")
    add_tokenizer(w)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    with pytest.raises(StartupError, match=r"odd\.gguf cannot be imported: .*nosuchmodel"):
        import_model(tmp_path / "odd.gguf", tmp_path / "served")


# -- Hugging Face directories ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_directory_keeps_weights_and_dtype(tmp_path: Path, dtype: str) -> None:
    model = tiny_llama().to(getattr(torch, dtype))
    import_model(write_hf(tmp_path / "hf", model), tmp_path / "served")
    saved = load_file(tmp_path / "served" / "model.safetensors")
    assert {t.dtype for t in saved.values()} == {getattr(torch, dtype)}
    back = load_model(tmp_path / "served", dtype=dtype).model.state_dict()
    assert all(torch.equal(back[name], tensor) for name, tensor in model.state_dict().items())


def test_digests_do_not_depend_on_files(tmp_path: Path) -> None:
    one = import_model(write_hf(tmp_path / "one", tiny_llama()), tmp_path / "a")
    many = import_model(write_hf(tmp_path / "many", tiny_llama(), shards=True), tmp_path / "b")
    assert len(many.files) > len(one.files) + 2
    assert model_digests(one) == model_digests(many)
    assert torch.equal(logits(load_model(tmp_path / "a").model), logits(load_model(tmp_path / "b").model))


def test_digests_tell_models_apart(tmp_path: Path, hf: Path) -> None:
    base = model_digests(import_model(hf, tmp_path / "base"))
    weights = load_file(hf / "model.safetensors")
    weights["model.norm.weight"][3] += 1
    save_file(weights, hf / "model.safetensors", metadata={"format": "pt"})
    other = model_digests(import_model(hf, tmp_path / "other"))
    assert {k for k in base if base[k] != other[k]} == {"weights_digest"}
    config = json.loads((hf / "config.json").read_text())
    (hf / "config.json").write_text(json.dumps(config | {"transformers_version": "9.9.9"}))
    assert model_digests(import_model(hf, tmp_path / "renamed")) == other
    (hf / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    changed = model_digests(import_model(hf, tmp_path / "changed"))
    assert {k for k in base if changed[k] != other[k]} == {"config_digest"}


def test_only_what_is_served_is_copied(tmp_path: Path, hf: Path) -> None:
    (hf / "modeling_custom.py").write_text("raise SystemExit")
    (hf / "pytorch_model.bin").write_bytes(b"not read")
    (hf / "README.md").write_text("x")
    import_model(hf, tmp_path / "served")
    assert not set(names(tmp_path / "served")) & {"modeling_custom.py", "pytorch_model.bin", "README.md"}


def test_pickled_weights_are_refused(tmp_path: Path, hf: Path) -> None:
    (hf / "model.safetensors").unlink()
    (hf / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(StartupError, match=r"pytorch_model\.bin is in a pickle format"):
        import_model(hf, tmp_path / "served")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("config.json", "config.json is missing"),
        ("tokenizer.json", "no tokenizer"),
        ("model.safetensors", "no weights"),
    ],
)
def test_incomplete_directory_is_refused(tmp_path: Path, hf: Path, name: str, message: str) -> None:
    (hf / name).unlink()
    with pytest.raises(StartupError, match=message):
        import_model(hf, tmp_path / "served")


def test_missing_shard_is_named(tmp_path: Path) -> None:
    source = write_hf(tmp_path / "hf", tiny_llama(), shards=True)
    shard = sorted(source.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(StartupError, match=f"{shard.name} is missing"):
        import_model(source, tmp_path / "served")


def test_shard_outside_the_directory_is_refused(tmp_path: Path) -> None:
    source = write_hf(tmp_path / "hf", tiny_llama(), shards=True)
    index = source / "model.safetensors.index.json"
    body = json.loads(index.read_text())
    body["weight_map"]["model.norm.weight"] = "../../secret.safetensors"
    index.write_text(json.dumps(body))
    with pytest.raises(StartupError, match="not a safetensors file of this directory"):
        import_model(source, tmp_path / "served")


def test_truncated_weights_are_refused(tmp_path: Path, hf: Path) -> None:
    path = hf / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(StartupError, match=rf"^{path} is not a whole safetensors file"):
        import_model(hf, tmp_path / "served")
    assert not (tmp_path / "served").exists()


def test_weights_that_do_not_fit_the_configuration_are_refused(tmp_path: Path, hf: Path) -> None:
    config = json.loads((hf / "config.json").read_text())
    (hf / "config.json").write_text(json.dumps({**config, "intermediate_size": 2 * config["intermediate_size"]}))
    with pytest.raises(ImportRefused, match=f"{hf}: .* in the weights, config.json asks for"):
        import_model(hf, tmp_path / "served")
    assert not (tmp_path / "served").exists()


def test_surplus_and_sizes_are_refused_by_the_source(tmp_path: Path, hf: Path) -> None:
    config = json.loads((hf / "config.json").read_text())
    for settings, message in (
        ({"num_hidden_layers": 1}, f"^{hf}: the weights have 9 tensors .*; num_hidden_layers is 1, the weights go up"),
        ({"num_hidden_layers": -1}, f"^{hf / 'config.json'}: num_hidden_layers is -1, it must be a positive integer"),
        ({"quantization_config": {"quant_method": "gptq"}}, f"^{hf / 'config.json'}: quantization_config 'gptq'"),
    ):
        (hf / "config.json").write_text(json.dumps(config | settings))
        with pytest.raises(StartupError, match=message):
            import_model(hf, tmp_path / "served")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("tokenizer.json", '{"x": 1}', "/tokenizer.json is not a tokenizer file: "),
        ("chat_template.jinja", "{% for x in %}", ": the chat template does not compile: Expected an expression"),
        ("tokenizer_config.json", "[]", "/tokenizer_config.json is not a JSON object"),
    ],
)
def test_broken_tokenizer_or_template_is_found_at_import(
    tmp_path: Path, hf: Path, name: str, text: str, message: str
) -> None:
    (hf / name).write_text(text)
    with pytest.raises(ImportRefused, match=f"^{hf}{message}"):
        import_model(hf, tmp_path / "served")
    assert not (tmp_path / "served").exists()


def test_import_says_when_there_is_no_chat_template(tmp_path: Path, hf: Path) -> None:
    lines: list[str] = []
    import_model(hf, tmp_path / "chats", progress=lines.append)
    assert not [line for line in lines if "/v1/chat/completions" in line]
    (hf / "chat_template.jinja").unlink()
    import_model(hf, tmp_path / "no-chats", progress=lines.append)
    assert "the model has no chat template: /v1/chat/completions will be refused" in lines[-2]


def test_model_that_needs_its_own_code_is_refused(tmp_path: Path, hf: Path) -> None:
    config = json.loads((hf / "config.json").read_text())
    config |= {"model_type": "homemade", "auto_map": {"AutoModelForCausalLM": "modeling.Homemade"}}
    (hf / "config.json").write_text(json.dumps(config))
    with pytest.raises(StartupError, match=r"'homemade' is not a causal .* never run"):
        import_model(hf, tmp_path / "served")


# -- Source and destination ------------------------------------------------------------------------------------------


def test_source_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(ImportRefused, match=r"nothing\.gguf does not exist"):
        import_model(tmp_path / "nothing.gguf", tmp_path / "served")


def test_source_that_is_something_else(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"PK\x03\x04 a zip file")
    with pytest.raises(ImportRefused, match="neither a Hugging Face directory nor a GGUF file"):
        import_model(tmp_path / "x.gguf", tmp_path / "served")


def test_repeated_import_returns_at_once(tmp_path: Path, hf: Path) -> None:
    first = import_model(hf, tmp_path / "served")
    before = (tmp_path / "served" / "model.safetensors").stat().st_ino
    lines: list[str] = []
    assert import_model(hf, tmp_path / "served", progress=lines.append) == first
    assert (tmp_path / "served" / "model.safetensors").stat().st_ino == before
    assert "already the complete import" in lines[0]


def test_destination_in_the_way_is_refused(tmp_path: Path, hf: Path) -> None:
    dest = tmp_path / "served"
    import_model(hf, dest, name="one")
    with pytest.raises(ImportRefused, match=r"under the name 'one', not 'two'\. Remove it, or import into"):
        import_model(hf, dest, name="two")
    (dest / "model.safetensors").write_bytes(b"x")
    with pytest.raises(ImportRefused, match=r"not a complete import .*model\.safetensors"):
        import_model(hf, dest, name="one")
    other = write_hf(tmp_path / "other", tiny_gemma())
    shutil.rmtree(dest)
    import_model(other, dest, name="one")
    was = r"from another source, other \(digest [0-9a-f]{16}\), not from"
    with pytest.raises(
        ImportRefused, match=rf"{was} {hf} \(digest [0-9a-f]{{16}}\)\. Remove it, or import into another"
    ):
        import_model(hf, dest, name="one")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ImportRefused, match="not a complete import"):
        import_model(hf, tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_empty_destination_is_used(tmp_path: Path, hf: Path) -> None:
    (tmp_path / "served").mkdir()
    import_model(hf, tmp_path / "served")
    verify_model_dir(tmp_path / "served")


def test_no_space_is_said_before_anything_is_written(tmp_path: Path, hf: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 10, 0))
    with pytest.raises(ImportRefused, match=r"has 0 MiB free but the import may need"):
        import_model(hf, tmp_path / "served")


def test_disk_full_while_writing_leaves_nothing(tmp_path: Path, hf: Path, monkeypatch: Any) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(importer, "build_manifest", full)
    with pytest.raises(ImportRefused, match="No space left"):
        import_model(hf, tmp_path / "served")
    assert names(tmp_path) == ["hf"]


def test_parallel_imports_both_succeed(tmp_path: Path, hf: Path, monkeypatch: Any) -> None:
    """Both get as far as the rename; one of them finds the other's result."""
    barrier, results = threading.Barrier(2), []
    flush = importer._flush
    monkeypatch.setattr(importer, "_flush", lambda path: (flush(path), barrier.wait(30)))
    threads = [threading.Thread(target=lambda: results.append(import_model(hf, tmp_path / "served"))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(results) == 2
    assert results[0] == results[1]
    assert names(tmp_path) == ["hf", "served"]


def test_imported_files_can_be_read_by_the_daemons_user(tmp_path: Path, hf: Path) -> None:
    import_model(hf, tmp_path / "served")
    assert (tmp_path / "served").stat().st_mode & 0o777 == 0o755
    assert {p.stat().st_mode & 0o777 for p in (tmp_path / "served").iterdir()} == {0o644}


# -- Command line ----------------------------------------------------------------------------------------------------


def run(*args: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "common.engine.importer", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_command_line(tmp_path: Path, hf: Path) -> None:
    done = run(hf, tmp_path / "served", "--name", "tiny", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["name"] == "tiny"
    assert result["path"] == str(tmp_path / "served")
    assert result["weights_digest"] == verify_model_dir(tmp_path / "served").weights_digest
    assert "copying model.safetensors" in done.stderr.splitlines()


def test_command_line_tells_a_repetition_from_an_import(tmp_path: Path, hf: Path) -> None:
    assert run(hf, tmp_path / "served").stdout.startswith(f"imported served into {tmp_path / 'served'} (")
    again = run(hf, tmp_path / "served")
    assert again.stdout.startswith(f"served is in {tmp_path / 'served'} (")
    assert again.stderr == f"{tmp_path / 'served'} is already the complete import of {hf}: nothing was done\n"


@pytest.mark.parametrize("name", ["a b", "-x", "x/y", "a" * 64, "\u00e4", "x\n"])
def test_names_that_nobody_could_write_are_refused(tmp_path: Path, hf: Path, name: str) -> None:
    with pytest.raises(ImportRefused, match=r"the model's name .* has the wrong form: letters, digits"):
        import_model(hf, tmp_path / "served", name=name)


def test_command_line_error(tmp_path: Path) -> None:
    done = run(tmp_path / "no", tmp_path / "served", "--json")
    assert done.returncode == 1
    assert done.stderr == f"prefillctl: {tmp_path / 'no'} does not exist.\n"
    assert json.loads(done.stdout)["error"]["code"] == "import"
    assert run("one-argument").returncode == 2
