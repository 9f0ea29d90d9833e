"""Authentication, the small endpoints, request ids, and everything that is refused before it costs anything."""

from __future__ import annotations

import asyncio

import pytest

OPEN = {"/livez", "/readyz"}


def all_routes(app):
    for resource in app.router.resources():
        for route in resource:
            if route.method != "HEAD":
                yield route.method, resource.canonical.replace("{model}", "test-model")


async def test_every_route_but_liveness_needs_a_key(serve):
    server = await serve(api_keys=("first-key", "second-key"))
    routes = list(all_routes(server.app))
    assert len(routes) >= 8
    for method, path in [*routes, ("GET", "/nothing/here"), ("PUT", "/v1/completions")]:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic first-key"}):
            async with server.session.request(method, path, headers=headers) as response:
                expected = 200 if path in OPEN else 401
                assert response.status == expected, (method, path)
                if expected == 401:
                    assert (await response.json())["error"]["code"] == "invalid_api_key"
                    assert response.headers["WWW-Authenticate"] == "Bearer"


async def test_keys_are_accepted_and_become_tenants(serve):
    server = await serve(api_keys=("first-key", "second-key"))
    for key in ("first-key", "second-key", "first-key"):
        status, _ = await server.post("/v1/completions", {"prompt": "x"}, Authorization=f"Bearer {key}")
        assert status == 200
    first, second, again = (a.request.tenant for a in server.dispatcher.submitted)
    assert first == again != second and "key" not in first and len(first) == 32


async def test_models(serve):
    server = await serve()
    async with server.session.get("/v1/models") as response:
        (model,) = (await response.json())["data"]
    assert model["id"] == "test-model" and model["object"] == "model" and model["max_model_len"] == 512
    async with server.session.get("/v1/models/test-model") as response:
        assert (await response.json())["id"] == "test-model"
    async with server.session.get("/v1/models/other") as response:
        assert response.status == 404 and (await response.json())["error"]["code"] == "model_not_found"


async def test_readiness(serve):
    server = await serve()
    async with server.session.get("/readyz") as response:
        assert response.status == 200
    server.dispatcher.is_ready = (False, "draining")
    async with server.session.get("/readyz") as response:
        assert response.status == 503 and (await response.json()) == {"is_ready": False, "why": "draining"}
    async with server.session.get("/livez") as response:
        assert response.status == 200


async def test_metrics_and_version(serve):
    server = await serve()
    await server.complete()
    async with server.session.get("/nowhere-%00") as response:
        assert response.status == 404
    async with server.session.get("/metrics") as response:
        text = await response.text()
    assert 'prfaas_http_responses_total{path="/v1/completions",status="200"} 1.0' in text
    assert 'prfaas_http_responses_total{path="other",status="404"} 1.0' in text
    async with server.session.get("/version") as response:
        assert (await response.json())["version"] == "0.0-test"


async def test_request_ids(serve):
    server = await serve()
    async with server.session.post("/v1/completions", json={"prompt": "x"}, headers={"X-Request-Id": "my-id.1"}) as r:
        assert r.headers["X-Request-Id"] == "my-id.1" and (await r.json())["id"] == "cmpl-my-id.1"
    assert server.dispatcher.submitted[0].request.request_id == "my-id.1"
    async with server.session.post("/v1/completions", json={"prompt": ""}) as r:
        assert r.status == 400 and len(r.headers["X-Request-Id"]) == 24
    for bad in ("", "a b", "x" * 129, "\u00e9", 'a"b'):
        async with server.session.post("/v1/completions", json={"prompt": "x"}, headers={"X-Request-Id": bad}) as r:
            assert r.status == 400 and (await r.json())["error"]["param"] == "X-Request-Id"
    async with server.session.post(
        "/v1/completions", json={"prompt": "x", "stream": True}, headers={"X-Request-Id": "s1"}
    ) as r:
        assert r.headers["X-Request-Id"] == "s1"


async def test_a_repeated_id_in_flight_gets_one_of_its_own(serve, spell):
    release = asyncio.Event()

    async def play(active):
        await release.wait()
        yield spell([97])[0]

    server = await serve(play)
    posts = [server.post("/v1/completions", {"prompt": "x"}, X_Request_Id="same") for _ in range(3)]
    tasks = [asyncio.create_task(p) for p in posts]
    while len(server.dispatcher.submitted) < 3:
        await asyncio.sleep(0.005)
    release.set()
    assert [status for status, _ in await asyncio.gather(*tasks)] == [200] * 3
    assert len({a.request.request_id for a in server.dispatcher.submitted}) == 3


async def test_route_override(serve):
    closed, opened = await serve(), await serve(allow_route_override=True)
    status, body = await closed.post("/v1/completions", {"prompt": "x"}, X_Prfaas_Route="remote")
    assert status == 400 and "http.allow_route_override" in body["error"]["message"]
    for route in ("local", "remote"):
        await opened.post("/v1/completions", {"prompt": "x"}, X_Prfaas_Route=route)
        assert opened.dispatcher.submitted[-1].request.forced_route == route
    status, body = await opened.post("/v1/completions", {"prompt": "x"}, X_Prfaas_Route="sideways")
    assert status == 400 and body["error"]["param"] == "X-Prfaas-Route"
    assert (await opened.post("/v1/completions", {"prompt": "x"}))[0] == 200
    assert opened.dispatcher.submitted[-1].request.forced_route is None


async def test_timing_header_is_checked(serve):
    server = await serve()
    status, body = await server.post("/v1/completions", {"prompt": "x"}, X_Prfaas_Timing="yes")
    assert status == 400 and body["error"]["param"] == "X-Prfaas-Timing"


@pytest.mark.parametrize(
    ("data", "content_type", "status"),
    [
        (b"{", "application/json", 400),
        (b"", "application/json", 400),
        (b"[1]", "application/json", 400),
        (b'{"prompt": NaN}', "application/json", 400),
        (b'{"prompt": "\xff"}', "application/json", 400),
        (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "application/json", 400),
        (b'{"seed": ' + b"9" * 5000 + b"}", "application/json", 400),
        (b'{"temperature": 1e999, "prompt": "x"}', "application/json", 400),
        (b'{"prompt": "\\ud800"}', "application/json", 400),
        (b'{"prompt": "x", "stop": "\\ud800"}', "application/json", 400),
        (b'{"prompt": "x", "\\ud800": 1}', "application/json", 400),
        (b'{"prompt": "x"}', "text/plain", 415),
        (b'{"prompt": "x"}', "application/json; charset=utf-16", 415),
        (b'{"prompt": "x"}', "application/json; charset=UTF-8", 200),
    ],
)
async def test_bodies(serve, data, content_type, status):
    server = await serve()
    async with server.session.post("/v1/completions", data=data, headers={"Content-Type": content_type}) as response:
        body = await response.json()
        assert response.status == status, body
        if status != 200:
            assert set(body["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("is_chunked", [True, False])
async def test_oversized_bodies(serve, is_chunked):
    server = await serve(max_body_bytes=10_000)

    async def parts():
        for _ in range(20):
            yield b" " * 1000

    data = parts() if is_chunked else b" " * 20_000
    async with server.session.post(
        "/v1/completions", data=data, headers={"Content-Type": "application/json"}
    ) as response:
        assert response.status == 413 and "10000" in (await response.json())["error"]["message"]


async def test_wrong_methods_and_paths(serve):
    server = await serve()
    async with server.session.get("/v1/completions") as response:
        assert response.status == 405 and response.headers["Allow"] == "POST"
        assert (await response.json())["error"]["code"] == "method_not_allowed"
    async with server.session.post("/v1/embeddings", json={}) as response:
        assert response.status == 404 and (await response.json())["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", [b"/\xff\xfe", b"/%ff", b"/v1/models/%ed%a0%80", b"//v1/models", b"/v1/models/a%00b"])
async def test_strange_paths(serve, path):
    server = await serve()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"GET " + path + b" HTTP/1.1\r\nHost: x\r\nX-Prfaas-Route: \xff\r\nConnection: close\r\n\r\n")
    assert (await reader.readline()).split()[1] in (b"400", b"404")
    writer.close()


async def test_arrival_is_stamped_before_the_body_is_read(serve):
    server = await serve()

    async def slow():
        yield b'{"prompt": '
        await asyncio.sleep(0.3)
        yield b'"x"}'

    before = asyncio.get_running_loop().time()
    headers = {"Content-Type": "application/json"}
    async with server.session.post("/v1/completions", data=slow(), headers=headers) as response:
        assert response.status == 200
    assert server.dispatcher.arrived_at - before < 0.2


async def test_a_bug_in_the_dispatcher_is_a_500_not_a_hang(serve):
    async def play(active):
        raise KeyError("bug")
        yield

    server = await serve(play)
    async with server.session.post("/v1/completions", json={"prompt": "x"}) as response:
        assert response.status == 500
    assert server.registry.get_sample_value("prfaas_http_responses_total", {"path": "/v1/completions", "status": "500"})
