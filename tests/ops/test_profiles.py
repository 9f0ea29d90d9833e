"""A node's profile in node.state_dir: read again for the same model and numerics, ignored with a reason otherwise."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.ctl_profile import profile_text
from common.fake import FakeOptions
from common.layout import ModelInfo
from common.policy.costs import DecodeCost, PrefillCost
from common.profiles import FILE_NAME, identity, load_profile, store

INFO = ModelInfo("m", "w", "c", "t", FakeOptions().layout(), 100, 4096, (2,), {"dtype": "float32", "threads": "1"})


def document(info: ModelInfo = INFO, **changes: Any) -> dict[str, Any]:
    return {
        "name": "n",
        "model": {"name": info.name, "digest": identity(info)},
        "numerics": info.numerics,
        "prefill": {"points": [[64, 0.1], [128, 0.2]], "constant_s": 0.01, "per_token_s": 1e-3, "per_square_s": 1e-8},
        "decode": {"base_s": 0.02, "per_row_s": 0.001, "per_context_s": 1e-6, "max_rows": 16},
        **changes,
    }


def test_what_is_kept_is_read_again(tmp_path: Path):
    path = store(tmp_path, document())
    assert path == tmp_path / FILE_NAME and [p.name for p in tmp_path.iterdir()] == [FILE_NAME]
    found = load_profile(tmp_path, INFO)
    assert found is not None
    assert found.cost() == PrefillCost(0.01, 1e-3, 1e-8)
    assert (found.decode, found.max_rows) == (DecodeCost(0.02, 0.001, 1e-6), 16)
    assert found.prefill(64) == pytest.approx(0.1)


def test_nothing_is_known_without_a_file_and_nothing_is_said(tmp_path: Path, caplog):
    with caplog.at_level(logging.INFO):
        assert load_profile(None, INFO) is None
        assert load_profile(tmp_path, INFO) is None
    assert not caplog.records


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        (replace(INFO, weights_digest="v"), "about another model, 'm'"),
        (replace(INFO, config_digest="d"), "about another model, 'm'"),
        (replace(INFO, layout=FakeOptions(kv_dtype="bfloat16").layout()), "about another model, 'm'"),
        (
            replace(INFO, numerics={"dtype": "bfloat16", "threads": "1"}),
            "about dtype = 'float32', which is 'bfloat16' now",
        ),
        (replace(INFO, numerics={"dtype": "float32"}), "about threads = '1', which is None now"),
        (replace(INFO, numerics={**INFO.numerics, "device": "cuda"}), "about device = 'None', which is 'cuda' now"),
    ],
)
def test_a_profile_of_another_model_or_other_numerics_is_not_used(tmp_path: Path, caplog, changed, why):
    store(tmp_path, document())
    assert load_profile(tmp_path, changed) is None
    assert why in caplog.text


def test_another_name_is_the_same_model(tmp_path: Path):
    store(tmp_path, document())
    assert load_profile(tmp_path, replace(INFO, name="other", tokenizer_digest="u")) is not None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "\x00\xff",
        "[" * 100_000,
        json.dumps({}),
        json.dumps(document(model=3)),
        json.dumps(document(model=None, numerics=[])),
        json.dumps(document(prefill=None)),
        json.dumps(document(prefill={"points": [[1, 2]]})),
        json.dumps(document(prefill={"points": {"a": 1}})),
        json.dumps(document(prefill={"points": [[1, 2], [3]]})),
        json.dumps(document(prefill={"constant_s": float("nan"), "per_token_s": 1})),
        json.dumps(document(prefill={"constant_s": 10**400, "per_token_s": 1})),
        json.dumps(document(prefill={"points": [[1, 2], [3, 10**400]]})),
        json.dumps(document(decode={"base_s": "x"})),
        json.dumps(document(decode=[1])),
        " " * (1 << 20) + json.dumps(document()),
    ],
)
def test_a_damaged_file_is_said_and_ignored(tmp_path: Path, caplog, text):
    (tmp_path / FILE_NAME).write_bytes(text.encode("latin-1"))
    assert load_profile(tmp_path, INFO) is None
    (record,) = caplog.records
    assert record.message.startswith("the profile is damaged and not used, measure again: ")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"prefill": {"constant_s": 1e5, "per_token_s": 1}}, "profile.prefill.constant_s must be a number"),
        ({"prefill": {"constant_s": 1, "per_token_s": 1e3}}, "profile.prefill.per_token_s must be a number"),
        ({"prefill": {"constant_s": 1, "per_token_s": 1, "per_square_s": 1}}, "profile.prefill.per_square_s must be"),
        ({"prefill": {"constant_s": 1e-300, "per_token_s": 0}}, "profile.prefill: constant_s, per_token_s and"),
        ({"prefill": {"points": [[1, 1e-300], [2, 1]]}}, "profile.prefill.points[0] must be"),
        ({"prefill": {"points": [[1, 1], [2, 1e300]]}}, "profile.prefill.points[1] must be"),
        ({"prefill": {"points": [[1, 1], [1e300, 1]]}}, "profile.prefill.points[1] must be"),
        ({"prefill": {"points": [[1, 1], [1 + 1e-15, 2]]}}, "profile.prefill.points[1] must have a token more"),
        ({"decode": {"base_s": 1e300}}, "profile.decode.base_s must be a number"),
        ({"decode": {"base_s": 1, "per_context_s": 1}}, "profile.decode.per_context_s must be a number"),
        ({"decode": {"base_s": 1e-300}}, "profile.decode: base_s, per_row_s and per_context_s must take"),
    ],
)
def test_numbers_that_no_machine_has_are_named_and_ignored(tmp_path: Path, caplog, changes, field):
    store(tmp_path, document(**changes))
    assert load_profile(tmp_path, INFO) is None
    assert field in caplog.text


def test_a_term_that_was_fitted_to_hardly_anything_is_taken(tmp_path: Path):
    store(tmp_path, document(decode={"base_s": 0.02, "per_row_s": 1e-19, "per_context_s": 0}))
    found = load_profile(tmp_path, INFO)
    assert found is not None and found.decode == DecodeCost(0.02, 1e-19, 0.0)


def test_every_prefix_of_a_file_is_damaged_or_whole(tmp_path: Path):
    path = store(tmp_path, document())
    whole = path.read_bytes()
    for length in range(len(whole) - 2):
        path.write_bytes(whole[:length])
        assert load_profile(tmp_path, INFO) is None
    path.write_bytes(whole)
    assert load_profile(tmp_path, INFO) is not None


def test_a_file_that_cannot_be_read_is_ignored(tmp_path: Path, caplog):
    (tmp_path / FILE_NAME).mkdir()
    assert load_profile(tmp_path, INFO) is None
    assert "damaged" in caplog.text


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch):
    store(tmp_path, document(name="old"))

    def fail(self: Path, target: Path) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="No space left"):
        store(tmp_path, document(name="new"))
    found = load_profile(tmp_path, INFO)
    assert found is not None and found.name == "old"


def test_people_are_shown_the_curve_and_the_costs():
    shown = document(warnings=[], state={"bytes_per_token": 46080, "fixed_bytes": 2048}, took_s=6.3, was_idle=False,
                     stored="/s/profile.json")  # fmt: skip
    assert profile_text(shown).splitlines() == [
        "prompt tokens  seconds  tokens/s",
        "           64      0.1       640",
        "          128      0.2       640",
        "prefill      10.0 ms + 1.00 ms a token + 10.0 ns a token squared",
        "decode step  20.0 ms + 1.00 ms a row + 1.00 us a token of context; 16 rows at most",
        "state        45.0 KiB a token + 2.00 KiB",
        "measured     m in 6.30 s, serving others",
        "kept in      /s/profile.json",
    ]
    del shown["decode"], shown["stored"]
    assert not [line for line in profile_text(shown).splitlines() if line.startswith(("decode", "kept"))]
