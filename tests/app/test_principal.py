"""Identity cookies: what proves who is acting, and what does not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.responses import HTMLResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from app.addresses import over_https
from app.errors import NoIdentity
from app.principal import CookieSigner, IdentityMiddleware, Principal, key_principal, require

SECRET = b"s" * 32


def signer(secret: bytes = SECRET) -> CookieSigner:
    return CookieSigner(secret, "anonymous")


def test_an_issued_cookie_proves_its_principal_and_ids_differ() -> None:
    first, value = signer().issue()
    second, _ = signer().issue()
    assert signer().check(value) == first
    assert first.id != second.id
    assert first.kind == "anonymous"


def test_a_cookie_of_another_secret_proves_nothing() -> None:
    _, value = signer(b"t" * 32).issue()
    assert signer().check(value) is None


@given(st.integers(0, 200), st.characters(min_codepoint=33, max_codepoint=126))
def test_a_changed_character_proves_nothing(position: int, character: str) -> None:
    principal, value = signer().issue()
    position %= len(value)
    changed = value[:position] + character + value[position + 1 :]
    assert (signer().check(changed) is None) == (changed != value)
    assert signer().check(value) == principal


@pytest.mark.parametrize(
    "value", ["", ".", "b-", "b-.", "owner." + "a" * 43, "b-é." + "a" * 43, "x" * 10_000]
)
def test_malformed_cookies_prove_nothing(value: str) -> None:
    assert signer().check(value) is None


def test_a_cookie_cannot_claim_to_be_the_machines_owner() -> None:
    s = signer()
    forged = f"owner.{s._mac('owner')}"  # even with the right signature
    assert s.check(forged) is None


def test_no_identity_is_said_in_a_sentence() -> None:
    with pytest.raises(NoIdentity, match="allow cookies"):
        require(signer(), {"cookie": "other=1; session_hash=abc"})


def test_other_cookies_of_the_host_do_not_hide_ours() -> None:
    principal, value = signer().issue()
    header = f'theme={{"a": "b, c"}}; {signer().name}={value}; weird=@[]'
    assert signer().from_headers({"cookie": header}) == principal


def test_cookie_attributes_follow_the_scheme() -> None:
    plain = signer().set_cookie("v", https=False)
    secure = signer().set_cookie("v", https=True)
    assert "HttpOnly" in plain
    assert "SameSite=Lax" in plain
    assert "Secure" not in plain
    assert "HttpOnly" in secure
    assert "SameSite=None; Secure; Partitioned" in secure


def test_two_servers_on_one_host_use_different_cookie_names() -> None:
    assert signer().name != signer(b"t" * 32).name


def page_client() -> TestClient:
    app = Starlette(
        routes=[Route("/", lambda _: HTMLResponse("hi")), Route("/data", lambda _: HTMLResponse("x"))]
    )
    return TestClient(IdentityMiddleware(app, signer()))


def test_the_page_sets_the_cookie_once() -> None:
    client = page_client()
    first = client.get("/", headers={"accept": "text/html"})
    assert signer().name in first.headers["set-cookie"]
    assert first.headers["cache-control"] == "no-store"
    assert "set-cookie" not in client.get("/", headers={"accept": "text/html"}).headers


def test_only_page_loads_set_it_and_tampered_ones_are_replaced() -> None:
    client = page_client()
    assert "set-cookie" not in client.get("/data", headers={"accept": "application/json"}).headers
    _, value = signer().issue()
    tampered = {"accept": "text/html", "cookie": f"{signer().name}={value[:-1]}"}
    assert "set-cookie" in client.get("/", headers=tampered).headers


def test_https_behind_a_proxy_is_noticed() -> None:
    headers = {"accept": "text/html", "x-forwarded-proto": "https"}
    assert "Partitioned" in page_client().get("/", headers=headers).headers["set-cookie"]


def test_keys_are_principals_of_their_own() -> None:
    a, b = key_principal("key-a", ["key-a", "key-b"]), key_principal("key-b", ["key-a", "key-b"])
    assert isinstance(a, Principal)
    assert isinstance(b, Principal)
    assert a.kind == "api_key"
    assert a.id != b.id
    assert "key-a" not in a.id
    assert key_principal("key-c", ["key-a", "key-b"]) is None
    assert key_principal("", []) is None


@pytest.mark.parametrize(
    ("scheme", "forwarded", "https"),
    [
        ("https", "", True),
        ("http", "https", True),
        ("http", "https, http", True),  # a proxy behind the first spoke http to us
        ("http", "http, https", False),
        ("http", "httpsx", False),
        ("http", "", False),
    ],
)
def test_whether_a_browser_spoke_https(scheme: str, forwarded: str, https: bool) -> None:
    assert over_https(scheme, {"x-forwarded-proto": forwarded}) is https
