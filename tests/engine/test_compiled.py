"""torch.compile as an option: the same model, or the model as it was and a line in the log."""

from __future__ import annotations

import logging

import pytest
import torch

from common.engine.compiled import compile_parts
from common.engine.kernels import short_forward


@pytest.fixture(autouse=True)
def forget():
    yield
    torch._dynamo.reset()


def compiled_parts(model) -> int:
    return sum(m._compiled_call_impl is not None for m in model.modules())


@pytest.mark.slow
def test_compiled_parts_give_the_same_tokens(tools, caplog) -> None:
    model = tools.tiny_model("Llama", 2)
    with torch.inference_mode():
        expected = short_forward(model)
    with caplog.at_level(logging.INFO):
        assert compile_parts(model, short_forward) == ""
    # Two norms and an MLP in each of two layers.
    assert "torch.compile compiled 6 parts" in caplog.text
    assert compiled_parts(model) == 6
    with torch.inference_mode():
        assert torch.allclose(short_forward(model), expected, atol=1e-4)


# Last: torch remembers a compiler that did not work.
def test_what_cannot_be_compiled_runs_as_it_is(tools, caplog, monkeypatch) -> None:
    model = tools.tiny_model("Llama", 2)
    with torch.inference_mode():
        expected = short_forward(model)
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", ("/nowhere/c++",))
    with caplog.at_level(logging.INFO):
        reason = compile_parts(model, short_forward)
    assert reason
    assert f"torch.compile failed, the model runs as it is: {reason}" in caplog.text
    assert compiled_parts(model) == 0
    with torch.inference_mode():
        assert torch.equal(short_forward(model), expected)


def test_another_result_is_refused(tools, monkeypatch) -> None:
    model = tools.tiny_model("Llama", 2)
    results = iter([torch.tensor([0.0, 1.0]), torch.tensor([0.0, 1.1])])
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **_: None)
    assert compile_parts(model, lambda _model: next(results)) == "the compiled parts give another result"
