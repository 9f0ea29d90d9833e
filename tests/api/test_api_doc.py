"""docs/api.md against the code that reads the parameters: every name, which endpoint takes it, and every range."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from common.errors import InvalidRequest
from decoded.api import schema
from decoded.api.fields import Fields
from decoded.api.prepare import _PROMPT_FIELD
from decoded.api.prompts import _ROLES
from decoded.api.schema import Limits, parse_params

DOC = Path(__file__).resolve().parents[2] / "docs" / "api.md"
LIMITS = Limits(model="m", vocab_size=1111, max_context=2222, default_max_tokens=64, max_prompts=128)
NAMES = {"vocabulary": LIMITS.vocab_size, "context": LIMITS.max_context}
KINDS = ("completions", "chat")
RANGE = re.compile(r"(-?[\d.]+) to (-?[\d.]+|vocabulary|context)")


def rows() -> dict[str, dict[str, str]]:
    """Parameter -> cells of its row."""
    lines = [line for line in DOC.read_text().split("## Headers")[0].splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    table = {name.strip("`"): {"completions": a, "chat": b, "values": text} for name, a, b, text in cells}
    assert len(table) == len(lines), "a parameter has two rows"
    return table


class Recorder(Fields):
    """Notes which fields are asked for, and within which bounds."""

    seen: dict[str, list[tuple[float, float]]]
    refused: set[str]

    def raw(self, name):
        if not self._prefix:
            self.seen.setdefault(name, [])
        return super().raw(name)

    def _bounds(self, name, low, high):
        if not self._prefix:
            self.seen.setdefault(name, []).append((low, high))

    def integer(self, name, low, high):
        self._bounds(name, low, high)
        return super().integer(name, low, high)

    def number(self, name, low, high):
        self._bounds(name, low, high)
        return super().number(name, low, high)

    def unsupported(self, name, *harmless):
        if not self._prefix:
            self.refused.add(name)
        return super().unsupported(name, *harmless)


@pytest.fixture(params=KINDS)
def read(request, monkeypatch):
    """(kind, field -> bounds of accepted parameters, refused parameters) as the code has them."""
    monkeypatch.setattr(Recorder, "seen", {}, raising=False)
    monkeypatch.setattr(Recorder, "refused", set(), raising=False)
    monkeypatch.setattr(schema, "Fields", Recorder)
    parse_params(request.param, {}, LIMITS)
    accepted = {name: bounds for name, bounds in Recorder.seen.items() if name not in Recorder.refused}
    return request.param, accepted | {_PROMPT_FIELD[request.param]: []}, Recorder.refused


def test_the_table_is_complete_and_says_who_takes_what(read):
    kind, accepted, refused = read
    told = {name: cells[kind] for name, cells in rows().items()}
    expected = dict.fromkeys(accepted, "yes") | dict.fromkeys(refused, "no")
    assert {name: mark for name, mark in told.items() if mark != "-"} == expected


def test_ranges_are_those_of_the_code(read):
    kind, accepted, _ = read
    for name, bounds in accepted.items():
        text = rows()[name]["values"]
        for low, high in bounds:
            told = [(float(a), float(NAMES.get(b, b))) for a, b in RANGE.findall(text)]
            wanted = (float(low), float(high))
            assert wanted in told, f"{kind}: {name} is read within {low} to {high}; the table says {text!r}"


def test_refused_parameters_list_the_values_that_ask_for_nothing():
    table = rows()
    for kind in KINDS:
        for name, harmless in schema._UNSUPPORTED[kind].items():
            if name in ("prompt", "echo"):  # parameters of the other endpoint
                continue
            told = re.findall(r"`([^`]*)`", table[name]["values"])
            assert [json.loads(value) for value in told] == list(harmless), name


def test_numbers_in_the_text_are_those_of_the_code():
    table = {name: cells["values"] for name, cells in rows().items()}
    assert f"up to {schema.MAX_STOPS} of them, of up to {schema.MAX_STOP_CHARS} characters" in table["stop"]
    assert f"up to {schema.MAX_BIASES} token ids" in table["logit_bias"]
    assert all(f"`{role}`" in table["messages"] for role in _ROLES)
    assert "up to 1024 characters" in table["user"]
    parse_params("chat", {"user": "x" * 1024}, LIMITS)
    with pytest.raises(InvalidRequest, match="1024"):
        parse_params("chat", {"user": "x" * 1025}, LIMITS)


def test_extensions_are_marked():
    """What OpenAI's own client does not name."""
    from openai.resources.chat.completions import Completions as Chat
    from openai.resources.completions import Completions

    theirs = set(Completions.create.__annotations__) | set(Chat.create.__annotations__)
    for name, cells in rows().items():
        assert ("*extension*" in cells["values"]) == (name not in theirs), name
