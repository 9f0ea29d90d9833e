"""Backends to test: the fake engine, tiny random models of several families, and (marker `model`) real weights."""

from __future__ import annotations

import asyncio
import copy
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from common.backend import ChunkDone, PrefillTask
from common.engine.fetch import model_dir as served_model_dir
from common.engine.kernel_norm import accelerate_norms
from common.engine.kernels import accelerate
from common.engine.loader import LoadedModel
from common.engine.manifest import Manifest
from common.engine.runner import Runner, RunnerOptions, load
from common.fake import FakeExecutor, FakeOptions
from common.local_backend import LocalBackend
from common.request import PromptLogprobs, Request, SamplingParams, TokenOutput
from common.worker import Factory, WorkerOptions
from tests.engine.families import BASE, WINDOW
from tests.engine.kitchen import Kitchen


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Whatever an earlier test left behind."""
    torch.set_num_threads(1)


def tiny_model(family: str, layers: int = 4, **extra: Any) -> Any:
    """A random causal language model with float32 weights; the same one every time."""
    torch.manual_seed(0)
    config_class = getattr(transformers, f"{family}Config")
    config = config_class(**(BASE | {"num_hidden_layers": layers} | extra))
    model_class = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")
    return model_class(config).eval().requires_grad_(False)


def mixed_model() -> Any:
    """Sliding-window and full layers in turn."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    return tiny_model("Gemma3Text", 6, layer_types=kinds, sliding_window=WINDOW, query_pre_attn_scalar=16)


def loaded(model: Any) -> LoadedModel:
    """As the loader would return it."""
    manifest = Manifest("tiny", (), "w", "c", "t", {})
    config = model.config.get_text_config()
    eos = config.eos_token_id
    eos = tuple(eos) if isinstance(eos, list) else (eos,)
    limit = getattr(config, "max_position_embeddings", None) or 512
    return LoadedModel(model, manifest, Path(), eos, config.vocab_size, limit)


def tiny_backend(
    model: Any, chunk_tokens: int, dtype: str = "float32", kv_dtype: str = "", parks: bool | None = None, **options: Any
):
    """A backend over a copy of `model`."""

    def build() -> Runner:
        torch.set_num_threads(1)
        own = copy.deepcopy(model).to(getattr(torch, dtype))
        accelerate(own)
        accelerate_norms(own)
        return Runner(loaded(own), RunnerOptions(dtype=dtype, kv_dtype=kv_dtype, room=chunk_tokens, parks=parks))

    return LocalBackend(build, WorkerOptions(**({"chunk_tokens": chunk_tokens} | options)))


def real_model(name: str) -> Path:
    """Directory of a served model. A missing one fails the test: a skipped test would look like a pass."""
    path = served_model_dir(name)
    if not path.is_dir():
        pytest.fail(f"{path} is missing: run `make model MODEL={name}` first.", pytrace=False)
    return path


MODELS: dict[str, Any] = {}


def _cached(name: str, build: Callable[[], Any]) -> Any:
    if name not in MODELS:
        MODELS[name] = build()
    return MODELS[name]


def _fake(room: int) -> Factory:
    sizes = {"num_layers": 4, "window_layers": 2, "window": WINDOW, "vocab_size": 320, "max_context": 512}
    return lambda: FakeExecutor(FakeOptions(0, 0, room=room, **sizes))


def _real(name: str, room: int, dtypes: dict[str, str]) -> Factory:
    path = real_model(name)
    return lambda: load(path, RunnerOptions(threads=1, room=room, **dtypes))


class Lab:
    """Starts backends of one kind and runs requests on them."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.open_backends: list[LocalBackend] = []

    async def backend(self, chunk_tokens: int = 32, **options: Any) -> LocalBackend:
        if self.kind == "tiny-full":
            made = tiny_backend(_cached("full", lambda: tiny_model("Llama")), chunk_tokens, **options)
        elif self.kind == "tiny-mixed":
            made = tiny_backend(_cached("mixed", mixed_model), chunk_tokens, **options)
        else:
            dtypes = {k: options.pop(k) for k in ("dtype", "kv_dtype") if k in options}
            build = _fake(chunk_tokens) if self.kind == "fake" else _real(self.kind, chunk_tokens, dtypes)
            made = LocalBackend(build, WorkerOptions(**({"chunk_tokens": chunk_tokens} | options)))
        await made.start()
        self.open_backends.append(made)
        return made

    async def close(self) -> None:
        for backend in self.open_backends:
            await backend.close()


@pytest.fixture
async def make_lab():
    labs: list[Lab] = []

    def make(kind: str) -> Lab:
        labs.append(Lab(kind))
        return labs[-1]

    yield make
    for lab in labs:
        await lab.close()


@pytest.fixture(params=["fake", "tiny-full", "tiny-mixed"])
def lab(request, make_lab) -> Lab:
    return make_lab(request.param)


@pytest.fixture
async def make_kitchen(tools):
    kitchens = []

    def make(kind: str) -> Kitchen:
        kitchens.append(Kitchen(kind, tools))
        return kitchens[-1]

    yield make
    for kitchen in kitchens:
        await kitchen.close()


class Gate:
    """Holds the engine thread inside its first prefill chunk and notes which sequences get chunks."""

    def __init__(self, backend: LocalBackend) -> None:
        self.lengths: list[int] = []
        self._inner = backend.executor.prefill
        self._entered, self._go = threading.Event(), threading.Event()
        backend.executor.prefill = self._prefill  # type: ignore[method-assign]

    def _prefill(self, chunk: Any, on_layer: Any) -> Any:
        self.lengths.append(len(chunk.seq.tokens))
        if len(self.lengths) == 1:
            self._entered.set()
            assert self._go.wait(30)
        return self._inner(chunk, on_layer)

    async def entered(self) -> None:
        assert await asyncio.to_thread(self._entered.wait, 30)

    def open(self) -> None:
        self._go.set()


class Tools:
    """What tests of backends share."""

    Gate = Gate

    WINDOW = WINDOW
    tiny_model = staticmethod(tiny_model)
    mixed_model = staticmethod(mixed_model)
    tiny_backend = staticmethod(tiny_backend)
    loaded = staticmethod(loaded)

    @staticmethod
    def prompt(num_tokens: int, seed: int = 0, vocab_size: int = 320) -> tuple[int, ...]:
        rnd = random.Random(seed * 100003 + num_tokens)
        return tuple(rnd.randrange(3, vocab_size) for _ in range(num_tokens))

    @staticmethod
    def request(
        prompt: tuple[int, ...],
        *,
        num_choices: int = 1,
        prompt_logprobs: int | None = None,
        priority: int = 0,
        **params: Any,
    ):
        sampling = SamplingParams(**({"max_tokens": 6, "temperature": 0.0, "ignore_eos": True} | params))
        return Request(
            "r", prompt, sampling, num_choices=num_choices, prompt_logprobs=prompt_logprobs, priority=priority
        )

    @staticmethod
    async def transfer(source: LocalBackend, tokens: tuple[int, ...], sink: Any, start: int = 0) -> list[Any]:
        """Compute a state at `source` and copy it into `sink`, as the net layer would; returns the job's items."""
        job, items = source.prefill(PrefillTask("r", tokens, start)), []
        async for item in job:
            items.append(item)
            if isinstance(item, ChunkDone):
                continue
            targets = sink.buffers(item.start, item.stop, item.layers)
            for target, view in zip(targets, item.buffers, strict=True):
                target[:] = view
            sink.landed(item.start, item.stop, item.layers)
        job.release()
        return items

    @staticmethod
    async def local(backend: LocalBackend, request: Request) -> list[TokenOutput | PromptLogprobs]:
        generation = await backend.open(request)
        generation.compute()
        return [output async for output in generation]

    @classmethod
    async def remote(cls, backend: LocalBackend, source: LocalBackend, request: Request) -> list[Any]:
        generation = await backend.open(request)
        if request.num_prompt_tokens > 1:
            await cls.transfer(source, request.prompt_tokens[:-1], generation.sink)
        generation.import_done(request.num_prompt_tokens - 1)
        return [output async for output in generation]

    @staticmethod
    def ids(outputs: list[Any], choice: int = 0) -> list[int]:
        return [o.token_id for o in outputs if isinstance(o, TokenOutput) and o.choice == choice]

    @staticmethod
    async def until_idle(*backends: LocalBackend) -> None:
        """Wait until the engines have nothing left and check that all state memory is free."""
        for backend in backends:
            await Tools.settled(backend)
            backend.worker.scheduler.check_integrity()
            assert backend.stats().state_bytes == {}

    @staticmethod
    async def settled(backend: LocalBackend) -> None:
        """Until the engine thread has taken every command posted so far."""
        done, loop = asyncio.Event(), asyncio.get_running_loop()
        backend.worker.post(lambda _scheduler: loop.call_soon_threadsafe(done.set) and None)
        async with asyncio.timeout(30):
            await done.wait()


@pytest.fixture
def model_dir() -> Callable[[str], Path]:
    return real_model


@pytest.fixture
def tools() -> type[Tools]:
    return Tools
