"""A model's chat template, rendered in Jinja's immutable sandbox with what published templates expect to find.

Templates come with the weights and are not trusted: they see plain JSON values only and cannot reach Python. Messages
come from clients: keys whose value is null are dropped, as templates print "None" otherwise. Called by tokenizer.py.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from common.errors import InvalidRequest, StartupError

_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training; for serving it is only its content."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class _DictFactory:
    """`dict(...)` without the type's own attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)


class ChatTemplate:
    """One compiled template. `special_tokens` are visible to it by name (bos_token, ...); errors begin with `label`.

    Raises:
        StartupError: the template does not compile.
    """

    def __init__(self, source: str, special_tokens: dict[str, str], label: str = "The model's chat template") -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals.update(raise_exception=_raise, strftime_now=_strftime_now, dict=_DictFactory())
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise StartupError(f"{label} does not compile: {error}.") from error
        self._special_tokens = dict(special_tokens)

    def render(self, messages: list[dict[str, Any]]) -> str:
        """The chat as text, ending with the opening of the assistant's turn.

        Raises:
            InvalidRequest: the template refuses the messages (for example roles that do not alternate).
        """
        plain = [_normalise(message) for message in messages]
        context = {"messages": plain, "tools": None, "documents": None, "add_generation_prompt": True}
        try:
            return self._template.render(**{**self._special_tokens, **context})
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise InvalidRequest(f"The model's chat template refuses these messages: {error}", "messages") from error


def _normalise(message: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in message.items() if value is not None}
    reasoning = next((kept[key] for key in _REASONING_KEYS if key in kept), None)
    if reasoning is not None:
        kept = {"thinking": reasoning, **kept, "reasoning_content": reasoning}
    return kept


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
