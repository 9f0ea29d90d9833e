"""The recall task, its tokenizer, the training form of KDA and the first steps of training; seconds, not minutes."""

from __future__ import annotations

import json
import random
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention

from benchmarks.tiny_hybrid import evaluate, task
from benchmarks.tiny_hybrid.inprocess import SPOILERS, LocalAnswerer
from benchmarks.tiny_hybrid.kda import chunk_kda, fast_kda
from benchmarks.tiny_hybrid.model import MAX_CONTEXT, new_model, save_tokenizer
from benchmarks.tiny_hybrid.train import Diverged, Stage, make_batch, save_model, train
from common.text.tokenizer import Tokenizer

TABLE, NAMED = task.Shape(48, 16, 0, 16, 32, num_names=0), task.Shape(96, 16, 4, 20, 32)
SHORT = (Stage(2, 2, (), table=TABLE), Stage(1, 2, (NAMED,), table=TABLE), Stage(8, 2, (NAMED,)))


def replay(words: list[str]) -> dict[str, str]:
    """What every name stands for, read off the text independently of the generator."""
    pairs = list(pairwise(words))
    table = {a: b for a, b in pairs if a[0] == "k" and b[0] == "v"}
    keys = {a: b for a, b in pairs if a in task.NAMES and b[0] == "k"}
    return {name: table[key] for name, key in keys.items()}


@pytest.mark.parametrize("num_words", [128, 256, 1024, 2048])
def test_answers_follow_from_the_text(num_words: int) -> None:
    for question in evaluate.questions(num_words, 5):
        values = replay(question.prompt[: question.prompt.index(task.ASK_NAMES)])
        assert len(question.prompt) == num_words + 2
        names = [question.prompt[-1], *question.answer[1:-1:2]]
        assert sorted(names) == sorted(task.NAMES)
        assert question.answer[::2] == [values[name] for name in names]
        assert len(question.answer) == task.ANSWER_WORDS and question.answer[-1] == task.END
        assert min(question.distances) > num_words // 3


def test_some_names_are_bound_again_and_the_last_counts() -> None:
    text = task.make_text(random.Random(0), task.shape_for(512))
    bound = [(a, b) for a, b in pairwise(text.words) if a in task.NAMES]
    assert len(bound) == task.NUM_NAMES + task.NUM_NAMES // 2
    assert dict(bound) == {name: b.key for name, b in zip(task.NAMES, text.bindings, strict=True)}


def test_the_same_seed_gives_the_same_texts_and_another_gives_others() -> None:
    assert evaluate.questions(256, 2) == evaluate.questions(256, 2)
    assert evaluate.questions(256, 2) != evaluate.questions(256, 2, seed=7)


def test_a_shape_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="more facts than words"):
        task.make_text(random.Random(0), task.Shape(50, 16, 0, 0))


def test_score_counts_values_not_names() -> None:
    question = evaluate.questions(256, 1)[0]
    score = evaluate.Score()
    score.add(question, question.answer)
    score.add(question, ["v0" if w == question.answer[0] else w for w in question.answer])
    score.add(question, [])
    assert score.total == 48 and 16 <= score.right < 32 and score.whole == 1
    assert sum(n for _, n in score.by_distance.values()) == 48


def test_tokenizer_reads_words_and_writes_them(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    question = evaluate.questions(128, 1)[0]
    ids = tokenizer.encode(" ".join(question.prompt))
    assert ids == task.ids_of(question.prompt) and tokenizer.num_tokens == len(task.WORDS) and not tokenizer.num_prefix
    answer = task.ids_of(question.answer)
    stream = tokenizer.detokenizer()
    text = "".join(stream.add(i) for i in answer) + stream.flush()
    assert text.split() == question.answer[:-1] and text == tokenizer.decode(answer)


def test_training_form_of_kda_equals_the_models_own() -> None:
    torch.manual_seed(0)
    shape = (2, 75, 2, 32)
    args = [torch.randn(shape) for _ in range(3)] + [-4 * torch.rand(shape) ** 3, torch.rand(shape[:3])]
    args = [a.requires_grad_() for a in args]
    state = torch.randn(2, 2, 32, 32)
    weight = torch.randn(shape)
    results = []
    for function in (chunk_kimi_delta_attention, chunk_kda):
        out, last = function(*args, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True)
        results.append((out, last, *torch.autograd.grad((out * weight).sum() + last.sum(), args)))
    for own, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, own, rtol=1e-4, atol=1e-5)


def test_strong_decay_and_large_gradients_stay_finite() -> None:
    torch.manual_seed(0)
    shape = (1, 64, 2, 32)
    args = [torch.randn(shape) for _ in range(3)] + [torch.full(shape, -50.0), torch.rand(shape[:3])]
    args = [a.requires_grad_() for a in args]
    out, _ = chunk_kda(*args)
    assert all(g.isfinite().all() for g in torch.autograd.grad((1e8 * out).sum(), args))


def test_training_form_of_the_forget_gate_equals_the_models_own_and_has_a_gradient_everywhere() -> None:
    gate = new_model(3).model.layers[0].self_attn.forget_gate
    x = 3.0 * torch.randn(1, 9, 128)
    expected = gate(x)
    with fast_kda():
        torch.testing.assert_close(gate(x), expected)
        gate.dt_bias.data.fill_(200.0)
        gate(x).sum().backward()
    assert torch.isfinite(gate.f_b_proj.weight.grad).all() and (gate.dt_bias.grad != 0).all()
    assert gate.forward.__func__ is type(gate).forward and "log" in type(gate).forward.__code__.co_names


def test_a_step_without_finite_gradients_changes_nothing_and_many_end_the_training() -> None:
    model = new_model(3)
    steps = train(model, 3, (Stage(20, 2, (NAMED,)),))
    next(steps)
    before = [p.clone() for p in model.parameters()]
    hook = model.model.norm.register_full_backward_hook(lambda _m, given, _out: (given[0] * torch.nan,))
    next(steps)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    with pytest.raises(Diverged, match="steps 2 to 7 are not finite"):
        list(steps)
    hook.remove()


def test_first_steps_learn_and_repeat_bit_for_bit() -> None:
    runs = []
    for _ in range(2):
        model = new_model(3)
        losses = [loss for _, loss in train(model, 3, SHORT)]
        runs.append((losses, [p.clone() for p in model.parameters()]))
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(a, b) for a, b in zip(runs[0][1], runs[1][1], strict=True))
    assert not any(torch.isnan(p).any() for p in runs[0][1])
    assert runs[0][0][-1].answers < runs[0][0][3].answers - 0.1


def test_training_uses_the_models_own_function_afterwards() -> None:
    """What was patched in for training is gone, and the saved model computes what the trained one did."""
    from transformers.models.kimi_linear import modeling_kimi_linear

    list(train(new_model(3), 3, SHORT[:1]))
    assert modeling_kimi_linear.chunk_kimi_delta_attention is chunk_kimi_delta_attention


def test_saved_model_is_small_and_untied(tmp_path: Path) -> None:
    model = new_model(3)
    save_model(model, tmp_path)
    answerer = LocalAnswerer(tmp_path)
    loaded = answerer._model
    assert sum(p.numel() for p in loaded.parameters()) <= 2_000_000
    assert loaded.config.max_position_embeddings == MAX_CONTEXT
    ids = make_batch(random.Random(0), 1, NAMED, 4).ids
    with torch.inference_mode():
        assert torch.equal(loaded(input_ids=ids).logits, model.eval()(input_ids=ids).logits)


@pytest.mark.parametrize("spoilt", SPOILERS)
def test_answers_come_with_every_kind_of_spoilt_state(spoilt: str) -> None:
    question = evaluate.questions(192, 1)[0]
    words = LocalAnswerer(new_model(3), spoilt)(question.prompt)
    assert 1 <= len(words) <= task.ANSWER_WORDS


@pytest.mark.parametrize(
    ("spoilt", "changed"),
    [
        ("recurrent state zeroed", {0, 1, 2}),
        ("recurrent state of the first layer zeroed", {0}),
        ("recurrent state rounded to bfloat16", {0, 1, 2}),
        ("latents zeroed", {3}),
        ("one chunk of latents zeroed", {3}),
    ],
)
def test_an_ablation_changes_the_state_it_names(spoilt: str, changed: set[int]) -> None:
    answerer, question = LocalAnswerer(new_model(3)), evaluate.questions(256, 1)[0]
    with torch.inference_mode():
        whole, spoilt_cache = (answerer.prefill(torch.tensor([task.ids_of(question.prompt)])) for _ in range(2))
        spoil = SPOILERS[spoilt]
        assert spoil is not None
        spoil(spoilt_cache)
    pairs = enumerate(zip(whole.layers, spoilt_cache.layers, strict=True))
    assert {n for n, (a, b) in pairs if not torch.equal(_state(a), _state(b))} == changed
    conv = zip(whole.layers[:3], spoilt_cache.layers[:3], strict=True)
    assert all(torch.equal(a.conv_states[0], b.conv_states[0]) for a, b in conv)


def _state(layer: Any) -> torch.Tensor:
    if hasattr(layer, "recurrent_states"):
        return layer.recurrent_states[0]
    return torch.cat((layer.keys, layer.values), -1)


class _Completions(BaseHTTPRequestHandler):
    """Answers every question right but for the first value."""

    seen: list[tuple[dict[str, str], dict[str, Any]]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append((dict(self.headers), body))
        asked = {" ".join(q.prompt): q.answer for q in evaluate.questions(256, 2)}
        text = " ".join(["v0", *asked[body["prompt"]][1:-1]])
        reply = json.dumps({"choices": [{"text": text}], "prfaas": {"route": "remote"}}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *_: Any) -> None:
        pass


def test_evaluation_over_http(capsys: pytest.CaptureFixture[str]) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Completions) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        command = ["--url", f"http://127.0.0.1:{server.server_port}", "--route", "remote", "--lengths", "256"]
        status = evaluate.main([*command, "--count", "2", "--json", "--at-least", "0.95"])
        server.shutdown()
    (result,) = json.loads(capsys.readouterr().out)
    firsts = [q.answer[0] for q in evaluate.questions(256, 2)]
    assert result["recall"] == (30 + firsts.count("v0")) / 32 and status == 1
    assert result["routes"] == {"remote": 2}
    headers, body = _Completions.seen[0]
    assert headers["X-Prfaas-Route"] == "remote" and body["temperature"] == 0
    assert body["max_tokens"] == task.ANSWER_WORDS
