"""transformers behind POST /v1/completions with token ids, only so that one client can measure every engine.

    --mode generate     model.generate: requests that came by then form a static batch, later ones wait for its end
    --mode continuous   its continuous batching: requests join and leave while others run
Greedy, streaming, ignoring the end token. Run as a process of its own by engines.py.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import queue
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from aiohttp import web
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig
from transformers import GenerationConfig as _GenerationConfig
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

GenerationConfig: Any = _GenerationConfig  # untyped there
GATHER_S = 0.02
BLOCK_TOKENS = 256


@dataclass
class Job:
    """One request; token ids go through `push`, from any thread."""

    prompt: list[int]
    max_tokens: int
    loop: asyncio.AbstractEventLoop
    tokens: asyncio.Queue[int | None] = field(default_factory=asyncio.Queue)
    num_pushed: int = 0
    is_cancelled: bool = False

    def push(self, token: int) -> None:
        if self.num_pushed < self.max_tokens:
            self.num_pushed += 1
            self.loop.call_soon_threadsafe(self.tokens.put_nowait, token)

    def end(self) -> None:
        self.loop.call_soon_threadsafe(self.tokens.put_nowait, None)


class Batcher(Protocol):
    """How jobs get computed."""

    def submit(self, job: Job) -> None: ...

    def cancel(self, job: Job) -> None: ...


class StaticBatcher:
    """model.generate on a thread of its own, one batch after the other."""

    def __init__(self, model: Any) -> None:
        self._model, self._jobs = model, queue.SimpleQueue[Job]()
        threading.Thread(target=self._main, daemon=True).start()

    def submit(self, job: Job) -> None:
        self._jobs.put(job)

    def cancel(self, job: Job) -> None:
        job.is_cancelled = True

    def _main(self) -> None:
        while True:
            batch = [self._jobs.get()]
            time.sleep(GATHER_S)
            while not self._jobs.empty():
                batch.append(self._jobs.get())
            self._run([job for job in batch if not job.is_cancelled])

    def _run(self, batch: list[Job]) -> None:
        if not batch:
            return
        longest = max(len(job.prompt) for job in batch)
        ids = torch.zeros(len(batch), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, job in enumerate(batch):
            ids[row, longest - len(job.prompt) :] = torch.tensor(job.prompt)
            mask[row, longest - len(job.prompt) :] = 1
        config = GenerationConfig(
            max_new_tokens=max(job.max_tokens for job in batch), do_sample=False, eos_token_id=None, pad_token_id=0
        )
        with torch.inference_mode():
            self._model.generate(
                ids,
                attention_mask=mask,
                generation_config=config,
                streamer=_Rows(batch),
                stopping_criteria=StoppingCriteriaList([_NobodyListens(batch)]),
            )
        for job in batch:
            job.end()


class _Rows(BaseStreamer):
    """Hands the tokens of each step to the jobs; the first call brings the prompts."""

    def __init__(self, batch: list[Job]) -> None:
        self._batch, self._has_prompt = batch, False

    def put(self, value: torch.Tensor) -> None:
        if self._has_prompt:
            for job, token in zip(self._batch, value.tolist(), strict=True):
                job.push(token)
        self._has_prompt = True

    def end(self) -> None:
        pass


class _NobodyListens(StoppingCriteria):
    def __init__(self, batch: list[Job]) -> None:
        self._batch = batch

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        is_done = all(job.is_cancelled for job in self._batch)
        return torch.full((input_ids.shape[0],), is_done, dtype=torch.bool)


class ContinuousBatcher:
    """transformers' ContinuousBatchingManager; its defaults but for the cache, which would take most of the memory."""

    def __init__(self, model: Any, *, cache_tokens: int, batch_tokens: int) -> None:
        config = ContinuousBatchingConfig(
            page_size=BLOCK_TOKENS,
            num_blocks=-(-cache_tokens // BLOCK_TOKENS),
            max_batch_tokens=batch_tokens,
            max_requests_per_batch=32,
            allow_block_sharing=False,
        )
        generation = GenerationConfig(max_new_tokens=1, do_sample=False, eos_token_id=-1, pad_token_id=0)
        self._manager = model.init_continuous_batching(generation_config=generation, continuous_batching_config=config)
        self._manager.start()
        self._names: dict[int, str] = {}

    def submit(self, job: Job) -> None:
        name = f"job-{id(job)}-{time.monotonic_ns()}"
        self._names[id(job)] = name

        def take(output: Any) -> None:
            if output.error:
                sys.stderr.write(f"{name}: {output.error}\n")
            for token in output.generated_tokens[job.num_pushed :]:
                job.push(token)
            if output.is_finished():
                self._names.pop(id(job), None)
                job.end()

        self._manager.register_result_handler(name, take)
        if self._manager.add_request(job.prompt, name, max_new_tokens=job.max_tokens, streaming=True) is None:
            job.end()

    def cancel(self, job: Job) -> None:
        if (name := self._names.pop(id(job), None)) is not None:
            self._manager.cancel_request(name)


def make_app(batcher: Batcher, tokenizer: Tokenizer) -> web.Application:
    """The two routes the benchmark uses."""

    async def completions(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        job = Job(body["prompt"], body["max_tokens"], asyncio.get_running_loop())
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply.prepare(request)
        batcher.submit(job)
        text, num_tokens = DecodeStream(skip_special_tokens=False), 0
        try:
            while (token := await job.tokens.get()) is not None:
                num_tokens += 1
                piece = text.step(tokenizer, token) or ""
                await _send(reply, {"choices": [{"index": 0, "text": piece}]})
        except (asyncio.CancelledError, ConnectionError):
            batcher.cancel(job)
            raise
        await _send(reply, {"choices": [], "usage": {"completion_tokens": num_tokens}})
        await reply.write(b"data: [DONE]\n\n")
        return reply

    async def health(_: web.Request) -> web.Response:
        return web.Response(text="ok")

    app = web.Application()
    app.add_routes([web.post("/v1/completions", completions), web.get("/health", health)])
    return app


async def _send(reply: web.StreamResponse, event: dict[str, Any]) -> None:
    await reply.write(f"data: {json.dumps(event)}\n\n".encode())


def main() -> None:
    """Load, then serve until SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--mode", choices=["generate", "continuous"], required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--cache-tokens", type=int, default=32768)
    parser.add_argument("--batch-tokens", type=int, default=2048)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    auto_class: Any = AutoModelForCausalLM
    model = auto_class.from_pretrained(args.model, dtype=torch.float32, local_files_only=True).eval()
    batcher: Batcher
    if args.mode == "generate":
        batcher = StaticBatcher(model)
    else:
        batcher = ContinuousBatcher(model, cache_tokens=args.cache_tokens, batch_tokens=args.batch_tokens)
    app = make_app(batcher, Tokenizer.from_file(f"{args.model}/tokenizer.json"))
    web.run_app(app, host="127.0.0.1", port=args.port, handler_cancellation=True, shutdown_timeout=1, print=None)
    os._exit(0)  # its threads may be in the middle of a batch; nothing is worth waiting for


if __name__ == "__main__":
    main()
