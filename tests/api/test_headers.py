"""What headers and API keys say about a request: its class and its deadline."""

from __future__ import annotations

import pytest

from decoded.api.auth import KeyRing
from decoded.api.contract import read_api_key


@pytest.mark.parametrize(("value", "seconds"), [("2", 2.0), ("0.25", 0.25), ("86400", 86400.0), (None, None)])
async def test_a_deadline_reaches_the_dispatcher(serve, value, seconds):
    server = await serve()
    headers = {} if value is None else {"X-Prfaas-Deadline": value}
    assert (await server.post("/v1/completions", {"prompt": "a"}, **headers))[0] == 200
    assert server.dispatcher.submitted[0].request.deadline_s == seconds


@pytest.mark.parametrize(
    "value", ["0", "0.0001", "86401", "-1", "inf", "nan", "1e3", "2s", "", " 2 3", "0x10", "9" * 400, "\u0662"]
)
async def test_a_wrong_deadline_names_the_header_and_the_bounds(serve, value):
    server = await serve()
    status, answer = await server.post("/v1/completions", {"prompt": "a"}, **{"X-Prfaas-Deadline": value})
    error = answer["error"]
    assert (status, error["param"], error["code"]) == (400, "X-Prfaas-Deadline", "invalid_value")
    assert error["message"].endswith("it must be a number of seconds from 0.001 to 86400.")
    assert not server.dispatcher.submitted and len(server.dispatcher.refused) == 1


async def test_a_class_comes_from_the_header_or_the_key_and_a_key_keeps_its_own(serve):
    server = await serve(api_keys=("plain-key", "bulk-key  batch "))

    async def class_of(key: str, **headers: str) -> tuple[int, str]:
        status, answer = await server.post("/v1/completions", {"prompt": "a"}, Authorization=f"Bearer {key}", **headers)
        return status, answer["error"]["code"] if status != 200 else server.dispatcher.submitted[
            -1
        ].request.service_class

    assert await class_of("plain-key") == (200, "")
    assert await class_of("plain-key", X_Prfaas_Class="urgent") == (200, "urgent")
    assert await class_of("bulk-key") == (200, "batch")
    assert await class_of("bulk-key", X_Prfaas_Class="batch") == (200, "batch")
    assert await class_of("bulk-key", X_Prfaas_Class="urgent") == (403, "class_not_allowed")
    assert (await class_of("bulk-key batch"))[0] == 401, "the class is no part of the key"
    tenants = [active.request.tenant for active in server.dispatcher.submitted]
    assert len(set(tenants[:2])) == 1 and len(set(tenants)) == 2


def test_lines_of_the_key_file():
    assert read_api_key("key") == ("key", "")
    assert read_api_key(" key   bulk ") == ("key", "bulk")


def test_a_key_may_change_its_class():
    keys = KeyRing(("a", "b bulk"))
    assert keys.replace(("a bulk", "b bulk", "c")) == (1, 0, 1)
    assert keys.identify("Bearer a")[1] == "bulk"
    assert keys.replace(("c",)) == (0, 2, 0)
