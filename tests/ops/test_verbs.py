"""What decodectl's verbs take from the control socket: anything that is JSON."""

from __future__ import annotations

import math

import pytest

from common.errors import ControlError
from decoded.verbs import parse_threshold


@pytest.mark.parametrize(
    ("given", "means"), [("0", 0), ("007", 7), (1000, 1000), ("1000000000", 10**9), ("inf", math.inf)]
)
def test_threshold(given: object, means: float) -> None:
    assert parse_threshold(given) == means


@pytest.mark.parametrize(
    "given",
    ["9" * 5001, "1000000001", 10**4000, "-1", "1.5", "\u0661", "", "nan", True, [], {}, {"a": "9" * 5001}, None],
)
def test_what_is_no_threshold_is_refused_in_a_line(given: object) -> None:
    with pytest.raises(ControlError, match=r"is not a token count from 0 to 1000000000, nor inf, nor auto$") as e:
        parse_threshold(given)
    assert len(str(e.value)) < 120
