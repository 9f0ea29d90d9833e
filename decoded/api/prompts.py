"""The prompt of a request: what forms it may have, and its token ids.

Completions take a string, token ids, or a list of either; chats take messages whose contents are strings or text parts.
Blocking (tokenising); run off the event loop. Called by prepare.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from common.request import SamplingParams
from common.text.tokenizer import PromptOverContext, Tokenizer
from decoded.api.errors import RequestRefused
from decoded.api.fields import Fields, bad_value, check_text, is_int
from decoded.api.schema import Limits, Params

_ROLES = ("system", "developer", "user", "assistant")
# What clients send back when they append a whole answer to the conversation.
_MESSAGE_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "refusal": (),
    "tool_call_id": (),
    "tool_calls": ([],),
}

Source = str | list[int] | list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt's token ids, and its text where it must be echoed: `num_added` leading ids are not part of it."""

    tokens: tuple[int, ...]
    text: str | None = None
    num_added: int = 0


def completion_sources(value: Any, limits: Limits) -> tuple[list[Source], bool]:
    """The prompts of a completion request as strings or token ids, and whether the client sent a list of prompts.

    Raises:
        RequestRefused: any other shape, an unknown token id, too many prompts.
    """
    if isinstance(value, str):
        return [check_text("prompt", value)], False
    if not isinstance(value, list) or not value:
        raise bad_value("prompt", value, "a string, a list of strings, token ids or a list of lists of token ids")
    if is_int(value[0]):
        return [_token_ids("prompt", value, limits)], False
    if len(value) > limits.max_prompts:
        raise bad_value("prompt", value, f"a list of at most {limits.max_prompts} prompts")
    is_text = isinstance(value[0], str)
    sources: list[Source] = []
    for index, item in enumerate(value):
        name = f"prompt[{index}]"
        if is_text and isinstance(item, str):
            sources.append(check_text(name, item))
        elif not is_text and isinstance(item, list):
            sources.append(_token_ids(name, item, limits))
        else:
            raise bad_value(name, item, "a string" if is_text else "a list of token ids")
    return sources, True


def chat_source(value: Any) -> list[dict[str, Any]]:
    """The messages of a chat request, contents flattened to strings.

    Raises:
        RequestRefused: anything that is no list of messages with text contents.
    """
    if not isinstance(value, list) or not value:
        raise bad_value("messages", value, "a list of at least one message")
    return [_message(f"messages[{index}]", item) for index, item in enumerate(value)]


def encode(source: Source, params: Params, limits: Limits, tokenizer: Tokenizer) -> Prompt:
    """Token ids of one source, checked against the context.

    Raises:
        RequestRefused: the prompt is empty or does not fit together with the tokens asked for.
    """
    # Even with max_tokens 0 the engine computes the last prompt token, whose output is then thrown away.
    max_tokens = limits.max_context - max(1, params.max_tokens if params.max_tokens is not None else 1)
    is_chat = params.kind == "chat"
    name = "messages" if is_chat else "prompt"
    text: str | None = None
    num_added = 0
    try:
        if isinstance(source, str):
            ids, text, num_added = tokenizer.encode(source, max_tokens=max_tokens), source, tokenizer.num_prefix
        elif is_chat:
            ids = tokenizer.encode_chat(source, max_tokens=max_tokens)  # type: ignore[arg-type]
        else:
            ids = source  # type: ignore[assignment]
            if len(ids) > max_tokens:
                raise PromptOverContext(len(ids), max_tokens)
            text = tokenizer.decode(ids, skip_special_tokens=False) if params.echo else None
    except PromptOverContext as error:
        raise _too_long(error, params, limits, name) from error
    if not ids:
        raise RequestRefused("The prompt has no tokens; at least 1 is needed.", name, "invalid_value")
    if max(ids) >= limits.vocab_size:  # tokenizers may know tokens (of images, say) that the weights do not have
        message = f"The prompt has token id {max(ids)}; this model's ids end at {limits.vocab_size - 1}."
        raise RequestRefused(message, name, "invalid_value")
    return Prompt(tuple(ids), text, num_added) if params.echo else Prompt(tuple(ids))


def resolve_sampling(params: Params, num_prompt_tokens: int, limits: Limits) -> SamplingParams:
    """Sampling with max_tokens settled: what was asked for, else the default as far as the context allows.

    An echo with max_tokens 0 samples one token that is thrown away: the engine always ends with a token.
    """
    room = limits.max_context - num_prompt_tokens
    max_tokens = params.max_tokens
    if max_tokens is None:
        max_tokens = min(room, max(limits.default_max_tokens, params.sampling.min_tokens))
    if params.sampling.min_tokens > max_tokens:
        raise bad_value("min_tokens", params.sampling.min_tokens, f"at most the {max_tokens} tokens that fit")
    return replace(params.sampling, max_tokens=max(1, max_tokens))


def _token_ids(name: str, value: list[Any], limits: Limits) -> list[int]:
    if len(value) > limits.max_context:
        return value  # refused by its length; not worth a look at each id
    for index, item in enumerate(value):
        if not is_int(item) or not 0 <= item < limits.vocab_size:
            raise bad_value(f"{name}[{index}]", item, f"a token id from 0 to {limits.vocab_size - 1}")
    return value


def _too_long(error: PromptOverContext, params: Params, limits: Limits, name: str) -> RequestRefused:
    about = "at least " if error.is_lower_bound else ""
    asked = params.max_tokens if params.max_tokens is not None else 1
    return RequestRefused(
        f"This model's maximum context length is {limits.max_context} tokens; the prompt has {about}{error.num_tokens} "
        f"tokens and {asked} more were asked for.",
        name,
        "context_length_exceeded",
    )


def _message(path: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise bad_value(path, value, "an object with role and content")
    fields = Fields(value, f"{path}.")
    role = fields.string("role", 64)
    if role not in _ROLES:
        raise bad_value(fields.path("role"), role, "one of " + ", ".join(_ROLES))
    for name, harmless in _MESSAGE_UNSUPPORTED.items():
        fields.unsupported(name, *harmless)
    message: dict[str, Any] = {"role": role, "content": _content(fields.path("content"), fields.raw("content"))}
    for name in ("name", "reasoning_content"):
        text = fields.string(name, 1 << 25)
        if text is not None:
            message[name] = text
    fields.finish()
    return message


def _content(path: str, value: Any) -> str:
    """A message's text. Several text parts are joined by line breaks."""
    if isinstance(value, str):
        return check_text(path, value)
    if not isinstance(value, list) or not value:
        raise bad_value(path, value, "a string or a list of text parts")
    texts: list[str] = []
    for index, part in enumerate(value):
        name = f"{path}[{index}]"
        if not isinstance(part, dict):
            raise bad_value(name, part, "an object with type and text")
        fields = Fields(part, f"{name}.")
        kind = fields.raw("type")
        if kind != "text":
            raise bad_value(fields.path("type"), kind, '"text"; other parts are not supported')
        text = fields.raw("text")
        if not isinstance(text, str):
            raise bad_value(fields.path("text"), text, "a string")
        texts.append(check_text(fields.path("text"), text))
        fields.finish()
    return "\n".join(texts)
