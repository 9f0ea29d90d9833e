"""From the bytes of a request body to validated parameters and token ids, in one blocking call.

Pure but for its CPU time: the app runs it in a thread for ordinary bodies and in a worker process for large ones, so
that neither JSON nor tokenising ever stops the event loop. Knows nothing of HTTP.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, NoReturn

from common.text.tokenizer import Tokenizer
from decoded.api.errors import RequestRefused
from decoded.api.fields import show
from decoded.api.prompts import Prompt, Source, chat_source, completion_sources, encode
from decoded.api.schema import Kind, Limits, Params, parse_params
from decoded.api.turns import Turn, turn_of

_PROMPT_FIELD: dict[Kind, str] = {"completions": "prompt", "chat": "messages"}


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request ready to be submitted. `rest` is the body without its prompt, from which `params` were read."""

    params: Params
    prompts: tuple[Prompt, ...]
    is_list: bool
    rest: dict[str, Any]
    turn: Turn | None = None
    """Of a chat: for the memory of turns."""


def prepare(kind: Kind, body: bytes, limits: Limits, tokenizer: Tokenizer) -> Prepared:
    """Parse, validate and tokenise.

    Raises:
        InvalidRequest: the body or a parameter is wrong.
    """
    try:
        return _prepare(kind, body, limits, tokenizer)
    except RecursionError as error:  # how deep is too deep depends on who looks at the values
        raise _too_deep() from error


def _prepare(kind: Kind, body: bytes, limits: Limits, tokenizer: Tokenizer) -> Prepared:
    rest = parse_json_object(body)
    name = _PROMPT_FIELD[kind]
    value = rest.pop(name, None)
    params = parse_params(kind, rest, limits)
    if value is None:
        raise RequestRefused(f"The required parameter {name} is missing.", name, "missing_required_parameter")
    messages = chat_source(value) if kind == "chat" else None
    if messages is not None:
        sources: list[Source] = [messages]
        is_list = False
    else:
        sources, is_list = completion_sources(value, limits)
    num_sequences = len(sources) * params.num_choices
    if num_sequences > limits.max_prompts:
        raise RequestRefused(
            f"{len(sources)} prompts with n {params.num_choices} are {num_sequences} choices; at most "
            f"{limits.max_prompts} are allowed.",
            "n",
            "invalid_value",
        )
    prompts = tuple(encode(source, params, limits, tokenizer) for source in sources)
    turn = turn_of(messages, prompts[0].tokens) if messages is not None else None
    return Prepared(params, prompts, is_list, rest, turn)


def parse_json_object(body: bytes) -> dict[str, Any]:
    """The body as a JSON object.

    Raises:
        RequestRefused: it is no JSON, no object, or uses what JSON does not have (NaN, endless nesting).
    """
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise RequestRefused(f"The body is not valid UTF-8 at byte {error.start}.", None, "invalid_json") from error
    except RecursionError as error:
        raise _too_deep() from error
    except ValueError as error:
        raise RequestRefused(f"The body is not valid JSON: {error}", None, "invalid_json") from error
    if not isinstance(value, dict):
        raise RequestRefused(f"The body is {show(value)}; it must be a JSON object.", None, "invalid_json")
    return value


def _too_deep() -> RequestRefused:
    return RequestRefused("The body is nested too deeply.", None, "invalid_json")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")
