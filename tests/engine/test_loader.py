"""Verifying and loading a served model directory: damage of any kind is refused with the file's name."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models

from common.engine.checkpoint import check_settings
from common.engine.importer import import_model
from common.engine.loader import LoadedModel, load_model, verify_model_dir
from common.engine.manifest import build_manifest, canonical_digest, model_digests, read_manifest
from common.engine.runner import RunnerOptions, load
from common.errors import StartupError
from common.layout import ModelInfo, StateLayout

SIZES = {
    "vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def make(path: Path, *, tie: bool = True, eos: int | list[int] = 2) -> Path:
    """An imported tiny llama at `path`/served."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**(SIZES | {"tie_word_embeddings": tie, "eos_token_id": eos}))
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(path / "hf")
    vocab = {f"t{n}": n for n in range(32)}
    Tokenizer(models.WordLevel(vocab, unk_token="t0")).save(str(path / "hf" / "tokenizer.json"))
    import_model(path / "hf", path / "served", name="tiny")
    return path / "served"


@pytest.fixture
def served(tmp_path: Path) -> Path:
    return make(tmp_path)


def restate(path: Path) -> None:
    """Write a manifest that fits the directory as it is now: what is left is for transformers to find."""
    (path / "manifest.json").unlink()
    (path / "manifest.json").write_text(build_manifest(path, "tiny", {"kind": "test"}).to_json())


# -- Verification ----------------------------------------------------------------------------------------------------


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


def extend(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\n")


def tamper(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def swap_for_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("damage", [truncate, extend, tamper, Path.unlink, swap_for_directory])
@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "generation_config.json"])
def test_damage_is_refused_with_the_name(served: Path, name: str, damage: Callable[[Path], None]) -> None:
    damage(served / name)
    with pytest.raises(StartupError, match=str(served / name)):
        verify_model_dir(served)
    with pytest.raises(StartupError, match=str(served / name)):
        load_model(served)


@pytest.mark.parametrize(
    "name",
    ["model-00002.safetensors", "pytorch_model.bin", "adapter_model.safetensors", "chat_template.jinja", "modeling.py"],
)
def test_unlisted_file_is_refused(served: Path, name: str) -> None:
    (served / name).write_bytes(b"x")
    with pytest.raises(StartupError, match=f"{name} is not listed"):
        verify_model_dir(served)


def test_notes_and_hidden_files_do_not_matter(served: Path) -> None:
    (served / "NOTES.md").write_text("bought on Tuesday")
    (served / ".stamp").write_text("")
    assert verify_model_dir(served).name == "tiny"


@pytest.mark.parametrize("damage", [truncate, tamper, swap_for_directory])
def test_damaged_manifest_is_refused(served: Path, damage: Callable[[Path], None]) -> None:
    damage(served / "manifest.json")
    with pytest.raises(StartupError, match=r"manifest\.json"):
        verify_model_dir(served)


def test_directory_that_was_never_imported(tmp_path: Path, served: Path) -> None:
    with pytest.raises(StartupError, match=r"manifest\.json is missing.*prefillctl model import SOURCE DEST"):
        load_model(tmp_path / "hf")
    with pytest.raises(StartupError, match=r"manifest\.json is missing"):
        load_model(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"files": {"../../etc/passwd": {"bytes": 1, "sha256": "0"}}},
        {"files": {"manifest.json": {"bytes": 1, "sha256": "0"}}},
        {"files": [1]},
        {"files": {"a": {"bytes": "x", "sha256": 0}}},
        {"digests": {"weights_digest": "0"}},
        {"digests": {"other": "0"}},
        {"name": None, "source": 7},
    ],
)
def test_nonsense_in_the_manifest_is_refused(served: Path, change: dict[str, Any]) -> None:
    path = served / "manifest.json"
    body = json.loads(path.read_text()) | change
    body.pop("manifest_digest")
    path.write_text(json.dumps(body | {"manifest_digest": canonical_digest(body)}))
    with pytest.raises(StartupError, match=r"manifest\.json is not a valid manifest"):
        read_manifest(served)


@pytest.mark.parametrize("text", ["[]", "null", '"x"', "{", "{}", "\x00"])
def test_other_json_in_the_manifest_is_refused(served: Path, text: str) -> None:
    (served / "manifest.json").write_text(text)
    with pytest.raises(StartupError, match=r"manifest\.json"):
        read_manifest(served)


def test_manifest_round_trip(served: Path) -> None:
    manifest = read_manifest(served)
    assert read_manifest(served) == manifest
    assert manifest.to_json() == (served / "manifest.json").read_text()
    assert manifest.total_bytes == sum(p.stat().st_size for p in served.iterdir() if p.name != "manifest.json")


def test_digests_fit_model_info(served: Path) -> None:
    info = ModelInfo(
        "tiny",
        **model_digests(read_manifest(served)),
        layout=StateLayout(()),
        vocab_size=1,
        max_context=1,
        eos_token_ids=(),
    )
    assert {len(info.weights_digest), len(info.config_digest), len(info.tokenizer_digest)} == {64}


# -- Loading ---------------------------------------------------------------------------------------------------------


def test_loaded_model_is_ready_for_inference(served: Path) -> None:
    loaded = load_model(served, attn_implementation="eager")
    assert isinstance(loaded, LoadedModel)
    assert not loaded.model.training
    assert not any(p.requires_grad for p in loaded.model.parameters())
    assert {p.dtype for p in loaded.model.parameters()} == {torch.float32}
    assert loaded.model.config._attn_implementation == "eager"
    assert (loaded.vocab_size, loaded.max_context, loaded.eos_token_ids) == (32, 64, (2,))
    assert loaded.tokenizer_dir == served
    assert loaded.manifest.name == "tiny"


def test_tied_embeddings_share_memory(tmp_path: Path) -> None:
    model = load_model(make(tmp_path)).model
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def test_untied_embeddings_stay_apart(tmp_path: Path) -> None:
    model = load_model(make(tmp_path, tie=False)).model
    assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_compute_dtype(served: Path, dtype: str) -> None:
    """Weights are rounded; the rotary frequencies must not be."""
    model = load_model(served, dtype=dtype).model
    assert {p.dtype for p in model.parameters()} == {getattr(torch, dtype)}
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32


def test_generation_config_knows_more_end_tokens(tmp_path: Path) -> None:
    served = make(tmp_path)
    generation = served / "generation_config.json"
    generation.write_text(json.dumps(json.loads(generation.read_text()) | {"eos_token_id": [9, 2, 9]}))
    restate(served)
    assert load_model(served).eos_token_ids == (2, 9)


def test_end_tokens_come_from_the_config_otherwise(tmp_path: Path) -> None:
    served = make(tmp_path, eos=[5, 3])
    (served / "generation_config.json").unlink()
    restate(served)
    assert load_model(served).eos_token_ids == (3, 5)


def test_end_tokens_outside_the_vocabulary_are_left_out_and_said(tmp_path, caplog) -> None:
    served = make(tmp_path, eos=[2, 400, -1])
    assert load_model(served).eos_token_ids == (2,)
    assert "eos_token_id [-1, 400]: not below vocab_size 32, so never sampled" in caplog.text


def test_missing_tensor_is_not_made_up(served: Path) -> None:
    weights = load_file(served / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, served / "model.safetensors", metadata={"format": "pt"})
    restate(served)
    with pytest.raises(StartupError, match=r"the weights lack model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(served)


def test_tensor_of_another_shape_is_refused(served: Path) -> None:
    weights = load_file(served / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(31)
    save_file(weights, served / "model.safetensors", metadata={"format": "pt"})
    restate(served)
    with pytest.raises(
        StartupError, match=r"model\.norm\.weight is \[31\] in the weights, config\.json asks for \[32\]"
    ):
        load_model(served)


def change_weights(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Alter the tensors of an imported directory, and its manifest with them."""
    weights = load_file(path / "model.safetensors")
    change(weights)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    restate(path)


def change_config(path: Path, **settings: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | settings))
    restate(path)


def test_layers_beyond_the_configuration_are_refused(served: Path) -> None:
    change_config(served, num_hidden_layers=1)
    message = (
        r"the weights have 9 tensors that the configuration has no place for: model\.layers\.1\.input_layernorm\.weight"
        r", .* and 6 more; num_hidden_layers is 1, the weights go up to layer 1 \(counted from 0\)\.$"
    )
    with pytest.raises(StartupError, match=message):
        load_model(served)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("model.layers.0.self_attn.q_proj.bias", "; attention_bias is false"),
        ("model.layers.1.mlp.up_proj.bias", "; mlp_bias is false"),
        ("model.layers.1.mlp.fourth_proj.weight", ""),
    ],
)
def test_unknown_tensor_is_refused(served: Path, name: str, why: str) -> None:
    change_weights(served, lambda w: w.__setitem__(name, torch.ones(3)))
    with pytest.raises(StartupError, match=f"have 1 tensor that the configuration has no place for: {name}{why}\\.$"):
        load_model(served)


def test_duplicates_and_rotary_buffers_are_no_surplus(served: Path) -> None:
    """Older checkpoints hold both, and mean the same model."""

    def add(weights: dict[str, torch.Tensor]) -> None:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
        weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)

    change_weights(served, add)
    model = load_model(served).model
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def test_layers_that_predict_further_tokens_are_no_surplus(served: Path) -> None:
    """Counted apart by the configuration, and not computed."""
    change_weights(served, lambda w: w.__setitem__("model.layers.2.eh_proj.weight", torch.ones(3)))
    with pytest.raises(StartupError, match=r"no place for: model\.layers\.2\.eh_proj\.weight"):
        load_model(served)
    change_config(served, num_nextn_predict_layers=1)
    load_model(served)


def test_what_the_class_declares_ignorable_is_no_surplus(tmp_path: Path) -> None:
    """Old GPT-2 checkpoints hold their masks, as bytes."""
    source = make(tmp_path) / ".." / "hf"
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=32, n_positions=64, eos_token_id=2)
    transformers.GPT2LMHeadModel(config).save_pretrained(source)
    weights = load_file(source / "model.safetensors")
    weights["transformer.h.0.attn.bias"] = torch.ones(1, 1, 4, 4, dtype=torch.uint8)
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    import_model(source, tmp_path / "gpt2")
    weights["transformer.h.0.attn.c_attn.weight"] = torch.ones(32, 96, dtype=torch.int8)
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(StartupError, match=r"attn\.c_attn\.weight is I8 in the weights, where the model has floats"):
        import_model(source, tmp_path / "whole-numbers")


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.int64])
def test_whole_numbers_for_floats_are_refused(served: Path, dtype: torch.dtype) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    change_weights(served, lambda w: w.__setitem__(name, w[name].to(dtype)))
    with pytest.raises(StartupError, match=f"{name} is (I8|BOOL|I64) in the weights, where the model has floats"):
        load_model(served)


@pytest.mark.parametrize("key", ["num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads"])
@pytest.mark.parametrize("value", [0, -1, 2.5, "two", True])
def test_sizes_must_be_positive_integers(served: Path, key: str, value: object) -> None:
    change_config(served, **{key: value})
    with pytest.raises(StartupError, match=rf"config\.json: {key} is {value!r}, it must be a positive integer\."):
        load_model(served)


def test_sizes_are_found_under_the_names_of_the_model(tmp_path: Path) -> None:
    check_settings("config.json", {"model_type": "gpt2", "n_layer": 2, "num_key_value_heads": [4, 0]})
    with pytest.raises(StartupError, match=r"^config\.json: n_layer is -2"):
        check_settings("config.json", {"model_type": "gpt2", "n_layer": -2})
    with pytest.raises(StartupError, match=r"^config\.json: text_config\.num_hidden_layers is 0"):
        check_settings("config.json", {"text_config": {"model_type": "llama", "num_hidden_layers": 0}})


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "fp8"])
def test_quantised_checkpoint_is_refused_as_such(served: Path, method: str) -> None:
    change_config(served, quantization_config={"quant_method": method, "bits": 4})
    with pytest.raises(StartupError, match=f"quantization_config '{method}': quantised checkpoints are not supported"):
        load_model(served)


def test_the_warning_of_a_slow_dtype_names_its_key(served: Path, caplog: pytest.LogCaptureFixture) -> None:
    load(served, RunnerOptions(dtype="bfloat16"))
    (told,) = [r for r in caplog.records if "torch computes all products" in r.message]
    assert told.levelname == "WARNING" and 'engine.dtype = "bfloat16"' in told.message


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(served: Path, bad: float) -> None:
    weights = load_file(served / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][0, 1] = bad
    save_file(weights, served / "model.safetensors", metadata={"format": "pt"})
    restate(served)
    with pytest.raises(
        StartupError, match=r"layers\.1\.mlp\.up_proj\.weight has 1 of \d+ values that are NaN or infinite"
    ):
        load_model(served)


def test_a_configuration_that_contradicts_itself_is_one_line(served: Path) -> None:
    config = json.loads((served / "config.json").read_text())
    (served / "config.json").write_text(json.dumps({**config, "hidden_size": 33}))
    restate(served)
    with pytest.raises(StartupError, match="cannot be loaded") as found:
        load_model(served)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float8"}, "dtype 'float8' is not one of float32, bfloat16, float16"),
        ({"device": "gpu"}, "device 'gpu' is not a device of torch"),
        ({"device": "cuda:99"}, "device 'cuda:99' was asked for but torch sees"),
        ({"attn_implementation": "no_such_attention"}, "cannot be loaded"),
    ],
)
def test_wrong_options_are_named(served: Path, options: dict[str, str], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        load_model(served, **options)


# -- Real models -----------------------------------------------------------------------------------------------------


@pytest.mark.model
def test_smollm2(smollm2_dir: Path) -> None:
    """Loads within seconds; its chat template, special tokens and end token are those of the instruct model."""
    began = time.monotonic()
    loaded = load_model(smollm2_dir)
    assert time.monotonic() - began < 20
    assert (loaded.vocab_size, loaded.max_context, loaded.eos_token_ids) == (49152, 8192, (2,))
    tokenizer = transformers.AutoTokenizer.from_pretrained(loaded.tokenizer_dir)
    chat = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert tokenizer.encode("<|im_start|>") == [1]
    assert (ids[0], ids.count(1), ids.count(2)) == (1, 3, 2)
    assert "Paris" in complete(loaded, tokenizer, ids, 12)


@pytest.mark.model
def test_gemma3(gemma3_dir: Path) -> None:
    """A base model: no chat template, bos before every text, 15 of 18 layers with a window of 512."""
    loaded = load_model(gemma3_dir, attn_implementation="eager")
    assert (loaded.vocab_size, loaded.max_context, loaded.eos_token_ids) == (262144, 32768, (1,))
    assert loaded.model.config.layer_types.count("sliding_attention") == 15
    assert loaded.model.config.sliding_window == 512
    tokenizer = transformers.AutoTokenizer.from_pretrained(loaded.tokenizer_dir)
    assert tokenizer.chat_template is None
    text = "naïve café  12345\n\n\t日本語 🙂"
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text
    ids = tokenizer.encode("The first three planets from the Sun are Mercury, Venus and")
    assert ids[0] == tokenizer.bos_token_id == 2
    assert "Earth" in complete(loaded, tokenizer, ids, 4)


def complete(loaded: LoadedModel, tokenizer: Any, ids: list[int], num_tokens: int) -> str:
    torch.set_num_threads(1)
    output = loaded.model.generate(torch.tensor([ids]), max_new_tokens=num_tokens, do_sample=False)
    return str(tokenizer.decode(output[0, len(ids) :]))
