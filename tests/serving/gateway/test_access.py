"""Every route of both gateways, with every kind of key and without one."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fastapi import APIRouter, FastAPI
from openai import AsyncOpenAI
from prometheus_client import CollectorRegistry
from pydantic import SecretStr, ValidationError
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from structlog.testing import capture_logs

from serving.gateway.access import ACCESS, Access
from serving.gateway.app import create_app, create_passthrough_app
from serving.gateway.config import GatewaySettings
from serving.gateway.upstream import Upstream
from speculator.errors import ConfigError
from tests.fixtures.doubles import DoubleEngine
from tests.serving.gateway.client import CHAT, HELLO, ask, error_of, serve
from tests.serving.gateway.keyfile import KeyFile, an_hour_ago, bearer
from tests.serving.gateway.passage import passing
from tests.serving.gateway.test_admin import DeskDouble, TargetsDouble
from tests.serving.sglang.outside.fake_sglang import MODEL, FakeSglang

ADMIN_KEY = "xyzzy-canary-of-the-admin-key"
ROLLOUTS = "/v1/rollouts"
CHAT_BODY: dict[str, Any] = {"model": "double", "messages": HELLO, "max_tokens": 3}


def local_app(keys: KeyFile | None, engine: DoubleEngine | None = None, **settings: Any) -> FastAPI:
    given = GatewaySettings(keys_file=None if keys is None else keys.path, admin_key=SecretStr(ADMIN_KEY), **settings)
    return create_app(
        engine or DoubleEngine(),
        settings=given,
        registry=CollectorRegistry(),
        drafts=DeskDouble(),
        targets=TargetsDouble(),
    )


def passthrough_app(keys: KeyFile | None) -> FastAPI:
    """In front of nothing: what goes on to SGLang comes back as 503."""
    settings = GatewaySettings(keys_file=None if keys is None else keys.path, admin_key=SecretStr(ADMIN_KEY))
    upstream = Upstream("http://127.0.0.1:1")
    return create_passthrough_app(
        DoubleEngine(),
        upstream,
        settings=settings,
        registry=CollectorRegistry(),
        drafts=DeskDouble(),
        targets=TargetsDouble(),
    )


def routes(app: FastAPI) -> list[tuple[str, str]]:
    found = app.routes
    assert all(isinstance(route, Route) for route in found)
    return sorted((method, route.path) for route in found for method in route.methods or () if method != "HEAD")


ROUTES = routes(local_app(None))
OF_SGLANG = sorted({*routes(passthrough_app(None))} - {*ROUTES})


@pytest.fixture
def keys(tmp_path: Path) -> KeyFile:
    file = KeyFile(tmp_path / "keys.json")
    file.add("user")
    file.add("reader", read_only=True)
    file.add("expired", expires_s=an_hour_ago())
    file.add("revoked")
    file.revoke("revoked")
    return file


PLACES = {"{version}": "7", "{a}": "7", "{b}": "8", "{model:path}": "double", "{name}": "main.js"}


def answer(app: FastAPI, method: str, path: str, headers: Any) -> httpx.Response:
    for name, value in PLACES.items():
        path = path.replace(name, value)
    bodies = {CHAT: CHAT_BODY, "/v1/target-version": {"version": 2}, "/admin/drafts/rollback": {"reason": "r"}}
    body = bodies.get(path, {"model": "double", "prompt": "p"}) if method == "POST" else None
    return ask(app, lambda client: client.request(method, path, headers=headers, json=body))


def test_the_table_has_every_route_and_no_other() -> None:
    assert {path for _, path in (*ROUTES, *OF_SGLANG)} == set(ACCESS)
    assert (len({*ROUTES}), len(OF_SGLANG)) == (27, 8)


WHO: dict[str, Any] = {
    "nobody": {},
    "wrong": bearer("secret-of-nobody"),
    "no scheme": {"authorization": "secret-of-user"},
    "basic": {"authorization": "Basic secret-of-user"},
    "empty": {"authorization": "Bearer "},
    "longer": bearer("secret-of-userx"),
    "shorter": bearer("secret-of-use"),
    "bytes": {b"authorization": b"Bearer \xff\xe9"},
    "revoked": bearer("secret-of-revoked"),
    "expired": bearer("secret-of-expired"),
    "reader": bearer("secret-of-reader"),
    "user": bearer("secret-of-user"),
    "admin": bearer(ADMIN_KEY),
}
_MISSING = {"nobody", "no scheme", "basic", "empty"}


def expected(access: Access, who: str) -> tuple[int, str] | None:
    """Status and code of the refusal; None where there is none."""
    if access is Access.OPEN:
        return None
    if access is Access.ADMIN:
        if who in _MISSING:
            return 401, "admin_key_missing"
        return None if who == "admin" else (403, "admin_key_wrong")
    if who in _MISSING:
        return 401, "api_key_missing"
    if who == "expired":
        return 401, "api_key_expired"
    if who == "reader":
        return (403, "key_is_read_only") if access in (Access.GENERATE, Access.QUEUE, Access.OWN) else None
    if who == "user":
        return (403, "key_is_not_read_only") if access is Access.WATCH else None
    return 401, "invalid_api_key"


@pytest.mark.parametrize("which", [local_app, passthrough_app])
@pytest.mark.parametrize(("method", "path"), [*ROUTES, *OF_SGLANG])
def test_every_route_opens_for_its_keys_alone(method: str, path: str, which: Any, keys: KeyFile) -> None:
    app = which(keys)
    if path.startswith(ROLLOUTS) if which is passthrough_app else (method, path) in OF_SGLANG:
        # There are no rollouts in front of SGLang, and some endpoints are there alone: as unknown as any other path.
        assert {answer(app, method, path, headers).status_code for headers in WHO.values()} == {404}
        return
    for who, headers in WHO.items():
        response, refusal = answer(app, method, path, headers), expected(ACCESS[path], who)
        if refusal is None:
            assert response.status_code not in (401, 403), (who, response.text)
            continue
        if path.startswith("/v1/messages"):
            kind = {401: "authentication_error", 403: "permission_error"}[refusal[0]]
            assert (response.status_code, response.json()["error"]["type"]) == (refusal[0], kind), who
        else:
            assert (response.status_code, error_of(response)["code"]) == refusal, who
        assert response.headers.get("www-authenticate") == ("Bearer" if refusal[0] == 401 else None)


def test_anthropics_clients_send_their_key_in_a_header_of_their_own(keys: KeyFile) -> None:
    app = passthrough_app(keys)
    for path, status in (("/v1/messages", 503), ("/v1/messages/count_tokens", 503), ("/v1/models?limit=1000", 200)):
        method = "GET" if "models" in path else "POST"
        assert answer(app, method, path, {"x-api-key": "secret-of-user"}).status_code == status
        assert answer(app, method, path, {"x-api-key": "secret-of-nobody"}).status_code == 401
        # Claude Code may also send another key of its user's there.
        both = {**bearer("secret-of-user"), "x-api-key": "secret-of-nobody"}
        assert answer(app, method, path, both).status_code == status


@pytest.mark.parametrize(("path", "secret"), [("/v1/models", "secret-of-user"), ("/admin/drafts", ADMIN_KEY)])
def test_the_scheme_of_a_key_is_read_in_any_case(path: str, secret: str, keys: KeyFile) -> None:
    for scheme in ("bearer", "BEARER"):
        assert answer(local_app(keys), "GET", path, {"authorization": f"{scheme} {secret}"}).status_code == 200
    assert answer(local_app(keys), "GET", path, {"authorization": f"Basic {secret}"}).status_code == 401


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_a_refused_request_reaches_nothing(method: str, path: str, keys: KeyFile) -> None:
    if ACCESS[path] is Access.OPEN:
        return
    engine, desk, targets = DoubleEngine(), DeskDouble(), TargetsDouble()
    settings = GatewaySettings(keys_file=keys.path, admin_key=SecretStr(ADMIN_KEY))
    app = create_app(engine, settings=settings, registry=CollectorRegistry(), drafts=desk, targets=targets)
    for headers in ({}, bearer("secret-of-revoked")):
        assert answer(app, method, path, headers).status_code in (401, 403)
    assert (engine.requests, desk.threads, targets.announced) == ([], set(), [])


def test_a_new_route_is_closed_until_it_is_in_the_table(keys: KeyFile, monkeypatch: pytest.MonkeyPatch) -> None:
    def hello() -> str:
        return "hello"

    for keyfile in (None, keys):
        app = local_app(keyfile)
        app.get("/new")(hello)
        app.router.routes.append(Route("/plain", lambda request: PlainTextResponse("hello")))
        app.mount("/mounted", PlainTextResponse("hello"))
        included = APIRouter()
        included.get("/included")(hello)
        app.include_router(included)
        for path in ("/new", "/plain", "/mounted/x", "/included"):
            for headers in (bearer("secret-of-user"), bearer(ADMIN_KEY)):
                response = answer(app, "GET", path, headers)
                assert (response.status_code, error_of(response)["code"]) == (403, "not_declared"), path
        monkeypatch.setitem(ACCESS, "/new", Access.OPEN)
        assert answer(app, "GET", "/new", {}).text == '"hello"'
        monkeypatch.undo()


@pytest.mark.parametrize(
    "path", ["/nothing", "/v1/embeddings", "/update_weights_from_disk", "//admin/drafts", "/ADMIN/drafts"]
)
def test_an_unknown_path_is_404_for_everyone(path: str, keys: KeyFile) -> None:
    for headers in ({}, bearer("secret-of-user"), bearer(ADMIN_KEY)):
        response = answer(local_app(keys), "GET", path, headers)
        assert (response.status_code, error_of(response)["code"]) == (404, "not_found")


def test_another_method_needs_the_key_too(keys: KeyFile) -> None:
    app = local_app(keys)
    assert answer(app, "DELETE", "/v1/models", {}).status_code == 401
    assert answer(app, "DELETE", "/v1/models", bearer("secret-of-user")).status_code == 405


def test_without_keys_it_is_open_but_for_the_admin() -> None:
    app = local_app(None)
    for method, path in ROUTES:
        for headers in ({}, bearer("whatever")):
            is_refused = answer(app, method, path, headers).status_code in (401, 403)
            assert is_refused is (ACCESS[path] is Access.ADMIN), path


# -- what a key says about its requests -----------------------------------------------------------------------------


def asked(keys: KeyFile, headers: dict[str, str], **fields: Any) -> tuple[str, bool]:
    """(tenant, captured) of a request with that key."""
    engine = DoubleEngine()
    app = local_app(keys, engine)
    body = {**CHAT_BODY, **fields}
    assert ask(app, lambda client: client.post(CHAT, json=body, headers=headers)).status_code == 200
    return engine.requests[0].policy.tenant, engine.requests[0].policy.capture


def test_the_key_says_whose_request_it_is_and_may_keep_it_from_being_recorded(keys: KeyFile) -> None:
    shy = keys.add("shy", capture=False)
    user = bearer("secret-of-user")
    no, yes = {"slipstream": {"capture": False}}, {"slipstream": {"capture": True}}
    assert [asked(keys, user), asked(keys, user, **no)] == [("tenant-of-user", True), ("tenant-of-user", False)]
    assert [asked(keys, shy), asked(keys, shy, **yes)] == [("tenant-of-shy", False)] * 2


def test_no_request_can_name_a_tenant(keys: KeyFile) -> None:
    headers = {**bearer("secret-of-user"), "x-tenant": "other"}
    engine = DoubleEngine()
    app = local_app(keys, engine)

    def sent(**fields: Any) -> httpx.Response:
        return ask(app, lambda client: client.post(CHAT, json={**CHAT_BODY, **fields}, headers=headers))

    assert sent(tenant="other").status_code == 200
    assert engine.requests[0].policy.tenant == "tenant-of-user"
    refused = sent(slipstream={"tenant": "other"})
    assert (refused.status_code, error_of(refused)["code"]) == (400, "unknown_parameter")


def test_sglang_gets_the_tenant_of_the_key(keys: KeyFile) -> None:
    async def run() -> list[Any]:
        fake = FakeSglang()
        async with passing(fake, keys_file=keys.path) as server, httpx.AsyncClient(base_url=server.url) as client:
            body = {"model": MODEL, "messages": HELLO}
            assert (await client.post(CHAT, json=body)).status_code == 401
            for each in (body, {**body, "tenant": "other"}):
                assert (await client.post(CHAT, json=each, headers=bearer("secret-of-user"))).status_code == 200
        return fake.bodies

    bodies = asyncio.run(run())
    assert [body["custom_params"]["slipstream"]["tenant"] for body in bodies] == ["tenant-of-user"] * 2
    assert [body["cache_salt"] for body in bodies] == ["tenant-of-user"] * 2


# -- a file that changes --------------------------------------------------------------------------------------------


def test_a_running_gateway_sees_new_and_revoked_keys_and_survives_a_broken_file(keys: KeyFile) -> None:
    app = local_app(keys)

    def status(name: str) -> int:
        return answer(app, "GET", "/v1/models", bearer(f"secret-of-{name}")).status_code

    assert (status("user"), status("new")) == (200, 401)
    keys.add("new")
    assert (status("user"), status("new")) == (200, 200)
    keys.revoke("user")
    assert (status("user"), status("new")) == (401, 200)
    good = keys.path.read_bytes()
    with capture_logs() as logs:
        for content in (b"{", b'{"version": 2, "keys": []}', b"\xff", b""):
            keys.path.write_bytes(content)
            assert (status("user"), status("new")) == (401, 200)
        keys.path.unlink()
        assert (status("user"), status("new")) == (401, 200)
        keys.path.write_bytes(b'{"version": 1, "keys": []}')
        assert status("new") == 401
        keys.path.write_bytes(good)
        assert status("new") == 200
    said = [each["reason"] for each in logs if each["event"] == "keys not read"]
    assert len(said) == 5
    assert all(str(keys.path) in reason for reason in said)
    assert [each["num_keys"] for each in logs if each["event"] == "keys read"] == [0, 3]


def test_a_read_that_failed_is_repeated(keys: KeyFile, monkeypatch: pytest.MonkeyPatch) -> None:
    app = local_app(keys)

    def status() -> int:
        return answer(app, "GET", "/v1/models", bearer("secret-of-user")).status_code

    def no_descriptor(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    keys.revoke("user")
    with capture_logs() as logs, monkeypatch.context() as full:
        full.setattr(Path, "open", no_descriptor)
        assert [status(), status()] == [200, 200]
    assert status() == 401
    assert [each["event"] for each in logs if each["event"].startswith("keys ")] == ["keys not read"]


def test_a_file_that_is_not_usable_ends_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        local_app(KeyFile(tmp_path / "none.json"))


# -- clients --------------------------------------------------------------------------------------------------------


def test_the_openai_client_raises_what_it_should(keys: KeyFile) -> None:
    keys.add("slow", requests_per_minute=1)

    async def run() -> None:
        async with serve(local_app(keys), grace_s=1) as server:

            async def talk(secret: str) -> Any:
                async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key=secret, max_retries=0) as client:
                    return await client.chat.completions.create(model="double", messages=HELLO, max_tokens=3)

            assert (await talk("secret-of-user")).usage.completion_tokens == 3
            with pytest.raises(openai.AuthenticationError) as unknown:
                await talk("wrong")
            assert (unknown.value.status_code, unknown.value.code) == (401, "invalid_api_key")
            with pytest.raises(openai.PermissionDeniedError) as reader:
                await talk("secret-of-reader")
            assert (reader.value.status_code, reader.value.code) == (403, "key_is_read_only")
            await talk("secret-of-slow")
            with pytest.raises(openai.RateLimitError) as slow:
                await talk("secret-of-slow")
            assert (slow.value.code, slow.value.type) == ("rate_limit_exceeded", "rate_limit_error")
            assert 55 <= int(slow.value.response.headers["retry-after"]) <= 60

    asyncio.run(run())


def test_a_refusal_reaches_a_client_with_a_large_body(keys: KeyFile) -> None:
    async def run() -> None:
        async with (
            serve(local_app(keys), grace_s=1) as server,
            AsyncOpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0) as client,
        ):
            for _ in range(5):
                with pytest.raises(openai.AuthenticationError):
                    await client.completions.create(model="double", prompt="x" * 3_000_000)

    asyncio.run(run())


# -- browsers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keyed", [False, True])
def test_no_other_site_is_let_in_and_every_answer_is_safe(keyed: bool, keys: KeyFile) -> None:
    app = local_app(keys if keyed else None)
    origin = {"origin": "https://elsewhere.example"}
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    seen = []
    for method, path in [*ROUTES, ("GET", "/nothing")]:
        seen.append(answer(app, method, path, origin))
        preflight = answer(app, "OPTIONS", path, {**origin, **asks})
        assert preflight.status_code in (401, 403, 404, 405)
        seen.append(preflight)
    for response in seen:
        assert not [name for name in response.headers if name.startswith("access-control-")]
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["x-frame-options"] == "DENY"
        assert "frame-ancestors 'none'" in response.headers["content-security-policy"]
        is_page = response.status_code == 200 and response.url.path in ("/", "/page/main.js")
        assert response.headers["cache-control"] == ("no-cache" if is_page else "no-store")


HOSTS = {
    "localhost": 200,
    "localhost:8000": 200,
    "127.0.0.1:8000": 200,
    "[::1]:8000": 200,
    "10.0.0.7": 200,
    # A container asks its host under these.
    "host.docker.internal:8000": 200,
    "host.containers.internal": 200,
    "host.docker.internal.example": 403,
    "elsewhere.example": 403,
    "localhost.elsewhere.example:8000": 403,
    "127.0.0.1.elsewhere.example": 403,
    "[::1": 403,
    "": 403,
}


@pytest.mark.parametrize(("host", "status"), HOSTS.items())
def test_without_keys_a_page_whose_name_leads_here_is_refused(host: str, status: int, keys: KeyFile) -> None:
    def ask_for(app: FastAPI, method: str, path: str) -> int:
        return answer(app, method, path, {"host": host, **bearer("secret-of-user")}).status_code

    for path in (CHAT, "/v1/completions"):
        assert ask_for(local_app(None), "POST", path) == status
        assert ask_for(local_app(None, auth_elsewhere=True), "POST", path) == 200
        assert ask_for(local_app(keys), "POST", path) == 200
    assert ask_for(local_app(None), "GET", "/metrics") == status
    assert ask_for(local_app(None), "GET", "/ready") == 200


# -- what is counted and told ---------------------------------------------------------------------------------------


def test_refusals_are_counted_and_no_secret_is_told(keys: KeyFile, capfd: pytest.CaptureFixture[str]) -> None:
    app = local_app(keys)
    with capture_logs() as logs:
        for method, path in ROUTES:
            for headers in WHO.values():
                answer(app, method, path, headers)
        metrics = answer(app, "GET", "/metrics", bearer("secret-of-reader")).text
    assert 'slipstream_gateway_refusals_total{code="invalid_api_key"}' in metrics
    assert 'slipstream_gateway_refusals_total{code="key_is_read_only"} 8.0' in metrics
    assert 'slipstream_gateway_refusals_total{code="admin_key_wrong"}' in metrics
    assert 'slipstream_gateway_requests_total{model_name="double",route="/v1/completions",status="401"}' in metrics
    for told in (repr(logs), metrics, "".join(capfd.readouterr())):
        assert "secret-of" not in told
        assert ADMIN_KEY not in told


def test_the_document_says_which_key_each_operation_needs(keys: KeyFile) -> None:
    document = local_app(keys).openapi()
    schemes = document["components"]["securitySchemes"]
    assert {name: (scheme["type"], scheme["scheme"]) for name, scheme in schemes.items()} == {
        "apiKey": ("http", "bearer"),
        "adminKey": ("http", "bearer"),
    }
    needed = {path: next(iter(found.values()))["security"] for path, found in document["paths"].items()}
    assert needed["/health"] == []
    assert needed["/v1/models/{model}"] == needed[CHAT] == [{"apiKey": []}]
    assert needed["/admin/drafts/{version}/pin"] == [{"adminKey": []}]
    open_document = local_app(None).openapi()
    assert [open_document["paths"][path]["get"]["security"] for path in ("/v1/models", "/admin/drafts")] == [
        [],
        [{"adminKey": []}],
    ]


def test_one_key_for_all_clients() -> None:
    """As other servers have it: it opens everything but /admin, metrics too, since there is one tenant."""
    settings = GatewaySettings(api_key=SecretStr("secret-of-all"))
    app = create_app(DoubleEngine(), settings=settings, registry=CollectorRegistry(), drafts=DeskDouble())
    for path in ("/v1/models", "/metrics"):
        assert answer(app, "GET", path, {}).status_code == 401
        assert answer(app, "GET", path, bearer("secret-of-others")).status_code == 401
        assert answer(app, "GET", path, bearer("secret-of-all")).status_code == 200
    assert ask(app, lambda client: client.post(CHAT, json=CHAT_BODY, headers=bearer("secret-of-all"))).is_success
    assert answer(app, "GET", "/admin/drafts", bearer("secret-of-all")).status_code == 403


@pytest.mark.parametrize("origins", ["https://chat.example.com", "app://one.md, https://chat.example.com", "*"])
def test_pages_of_named_sites_may_call_from_a_browser(tmp_path: Path, origins: str) -> None:
    headers = (keys := KeyFile(tmp_path / "keys")).add("a")
    app = local_app(keys, cors_origins=origins)
    site = {"origin": "https://chat.example.com"}
    asks = {**site, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    preflight = ask(app, lambda client: client.options(CHAT, headers=asks))
    assert preflight.status_code == 200
    assert "authorization" in preflight.headers["access-control-allow-headers"]
    answers = [
        ask(app, lambda client: client.post(CHAT, json=CHAT_BODY, headers=site)),
        ask(app, lambda client: client.post(CHAT, json=CHAT_BODY, headers={**site, **headers})),
    ]
    assert [answer.status_code for answer in answers] == [401, 200]
    for answer in (preflight, *answers):
        assert answer.headers["access-control-allow-origin"] in {"*", "https://chat.example.com"}
    assert {answer.headers["access-control-expose-headers"] for answer in answers} == {"*"}


@pytest.mark.parametrize("origins", ["", "https://another.example.com"])
def test_pages_of_no_other_site_may(origins: str) -> None:
    site = {"origin": "https://chat.example.com"}
    answer = ask(local_app(None, cors_origins=origins), lambda client: client.post(CHAT, json=CHAT_BODY, headers=site))
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("origins", ["chat.example.com", "https://chat.example.com/", "https://a,*"])
def test_what_is_no_origin_is_refused(origins: str) -> None:
    with pytest.raises(ValidationError, match="cors_origins"):
        local_app(None, cors_origins=origins)
