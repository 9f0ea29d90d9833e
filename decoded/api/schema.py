"""The parameters of both generating endpoints: what is accepted, in which range, and what it means for sampling.

Everything but the prompt itself, which prompts.py reads. Pure: a JSON object and the model's limits in, frozen Params
out, or RequestRefused naming parameter, value and limit. Called by prepare.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from common.request import SamplingParams
from decoded.api.errors import RequestRefused
from decoded.api.fields import Fields, bad_value, check_text

Kind = Literal["completions", "chat"]

MAX_CHOICES = 128
MAX_STOPS = 4
MAX_STOP_CHARS = 4096
MAX_LOGPROBS = 20
MAX_BIASES = 4096
_INT64 = 2**63

# Known parameters of OpenAI's API that are not offered, each with the values that ask for nothing.
_UNSUPPORTED: dict[Kind, dict[str, tuple[Any, ...]]] = {
    "completions": {"best_of": (1,), "suffix": ("",)},
    "chat": {
        "audio": (),
        "echo": (False,),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "metadata": ({},),
        "modalities": (["text"],),
        "parallel_tool_calls": (True, False),
        "prediction": (),
        "prompt": (),
        "reasoning_effort": (),
        "response_format": ({"type": "text"},),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
        "verbosity": ("medium",),
        "web_search_options": (),
    },
}


@dataclass(frozen=True, slots=True)
class Limits:
    """What the model and the operator allow. `max_prompts` bounds prompts x choices of one request."""

    model: str
    vocab_size: int
    max_context: int
    default_max_tokens: int
    max_prompts: int


@dataclass(frozen=True, slots=True)
class Params:
    """A validated request without its prompts. `max_tokens` None means the default, once the prompt's length is known;
    `sampling.max_tokens` is not meaningful until then.
    """

    kind: Kind
    sampling: SamplingParams
    max_tokens: int | None = None
    num_choices: int = 1
    stop: tuple[str, ...] = ()
    echo: bool = False
    stream: bool = False
    include_usage: bool = False

    @property
    def logprobs(self) -> int | None:
        """Alternatives wanted per token, None for no log probabilities."""
        return self.sampling.logprobs


def parse_params(kind: Kind, body: dict[str, Any], limits: Limits) -> Params:
    """Validate every field but `prompt` / `messages` (which must have been taken out).

    Raises:
        RequestRefused: with 404 for another model's name, else 400.
    """
    fields = Fields(body)
    _check_model(fields, limits)
    for name, harmless in _UNSUPPORTED[kind].items():
        fields.unsupported(name, *harmless)
    fields.string("user", 1024)
    echo = fields.boolean("echo") if kind == "completions" else False
    stream = fields.boolean("stream")
    max_tokens = _max_tokens(fields, limits, lowest=0 if echo else 1)
    params = Params(
        kind=kind,
        sampling=_sampling(kind, fields, limits, max_tokens),
        max_tokens=max_tokens,
        num_choices=fields.integer("n", 1, MAX_CHOICES) or 1,
        stop=_stop(fields),
        echo=echo,
        stream=stream,
        include_usage=_include_usage(fields, stream),
    )
    fields.finish()
    return params


def _check_model(fields: Fields, limits: Limits) -> None:
    model = fields.raw("model")
    if model is None:
        return
    if not isinstance(model, str):
        raise bad_value("model", model, "a string")
    if model != limits.model:
        shown = check_text("model", model)[:200]
        raise RequestRefused(
            f"The model {shown!r} does not exist; this server serves {limits.model!r}.", "model", "model_not_found", 404
        )


def _sampling(kind: Kind, fields: Fields, limits: Limits, max_tokens: int | None) -> SamplingParams:
    top_k = fields.integer("top_k", -1, limits.vocab_size) or 0
    top_p = fields.number("top_p", 0, 1)
    if top_p == 0:  # a nucleus without mass is the best token alone
        top_k, top_p = 1, 1.0
    temperature = fields.number("temperature", 0, 2)
    return SamplingParams(
        max_tokens=max_tokens or 0,
        temperature=1.0 if temperature is None else temperature,
        top_p=1.0 if top_p is None else top_p,
        top_k=max(0, top_k),
        min_p=fields.number("min_p", 0, 1) or 0.0,
        seed=fields.integer("seed", -_INT64, _INT64 - 1),
        presence_penalty=fields.number("presence_penalty", -2, 2) or 0.0,
        frequency_penalty=fields.number("frequency_penalty", -2, 2) or 0.0,
        repetition_penalty=fields.number("repetition_penalty", 0.01, 10) or 1.0,
        logit_bias=_logit_bias(fields, limits),
        min_tokens=_min_tokens(fields, limits, max_tokens),
        ignore_eos=fields.boolean("ignore_eos"),
        logprobs=_logprobs(kind, fields),
    )


def _max_tokens(fields: Fields, limits: Limits, lowest: int) -> int | None:
    old = fields.integer("max_tokens", lowest, limits.max_context)
    new = fields.integer("max_completion_tokens", lowest, limits.max_context)
    if old is not None and new is not None and old != new:
        raise bad_value("max_completion_tokens", new, f"equal to max_tokens ({old}) when both are given")
    return old if new is None else new


def _min_tokens(fields: Fields, limits: Limits, max_tokens: int | None) -> int:
    value = fields.integer("min_tokens", 0, limits.max_context) or 0
    if max_tokens is not None and value > max_tokens:
        raise bad_value("min_tokens", value, f"at most max_tokens ({max_tokens})")
    return value


def _logprobs(kind: Kind, fields: Fields) -> int | None:
    if kind == "completions":
        return fields.integer("logprobs", 0, MAX_LOGPROBS)
    wanted = fields.boolean("logprobs")
    top = fields.integer("top_logprobs", 0, MAX_LOGPROBS)
    if top is not None and not wanted:
        raise bad_value("top_logprobs", top, "left out unless logprobs is true")
    return (top or 0) if wanted else None


def _stop(fields: Fields) -> tuple[str, ...]:
    value = fields.raw("stop")
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MAX_STOPS:
        raise bad_value("stop", value, f"a string or a list of at most {MAX_STOPS} strings")
    for stop in stops:
        if not isinstance(stop, str) or not 0 < len(stop) <= MAX_STOP_CHARS:
            raise bad_value("stop", stop, f"made of strings of 1 to {MAX_STOP_CHARS} characters")
        check_text("stop", stop)
    return tuple(dict.fromkeys(stops))


def _logit_bias(fields: Fields, limits: Limits) -> tuple[tuple[int, float], ...]:
    value = fields.raw("logit_bias")
    if value is None:
        return ()
    if not isinstance(value, dict) or len(value) > MAX_BIASES:
        raise bad_value("logit_bias", value, f"an object of at most {MAX_BIASES} token ids")
    biases: dict[int, float] = {}
    entries = Fields(value, "logit_bias.")
    for key in value:
        if not (key.isascii() and key.isdecimal() and len(key) < 12 and int(key) < limits.vocab_size):
            raise bad_value(
                "logit_bias", check_text("logit_bias", key), f"keyed by token ids below {limits.vocab_size}"
            )
        bias = entries.number(key, -100, 100)
        if bias is not None:
            biases[int(key)] = bias
    return tuple(sorted(biases.items()))


def _include_usage(fields: Fields, stream: bool) -> bool:
    value = fields.raw("stream_options")
    if value is None:
        return False
    if not isinstance(value, dict):
        raise bad_value("stream_options", value, "an object")
    if not stream:
        raise bad_value("stream_options", value, "left out unless stream is true")
    options = Fields(value, "stream_options.")
    include_usage = options.boolean("include_usage")
    options.unsupported("include_obfuscation", False)
    options.finish()
    return include_usage
