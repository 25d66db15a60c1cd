"""Requests that cost little to send and much to answer; what a page on another port of this machine gets."""

from __future__ import annotations

import json
import math
import time
import tracemalloc
from collections.abc import AsyncIterator
from typing import Any

import gradio as gr
import httpx
import pytest
from pydantic import ValidationError
from starlette.requests import Request

from app import gate, openai_api, store
from app.addresses import client_address
from app.errors import QuotaRefused, TitleRefused, ValueRefused
from app.keys import checked_name
from app.messages import MessageEncoder
from app.openai_schema import ChatMessage, ChatRequest
from app.principal import Principal
from app.runtime import Runtime
from app.server import create_app
from engine.types import Delta, Done, TokenLogprob
from tests.app.fakes import CharTokenizer, FakeEngine, events_of, receipt

HTML = {"accept": "text/html"}
BASE = "http://127.0.0.1:7860"
URL = "/v1/chat/completions"
ANN = Principal("anonymous", "b-ann")


def body(**more: Any) -> dict[str, Any]:
    return {"model": "fake-model", "messages": [{"role": "user", "content": "Hi"}], **more}


@pytest.fixture
async def page(runtime: Runtime) -> AsyncIterator[httpx.AsyncClient]:
    """A visitor elsewhere, with a cookie."""
    transport = httpx.ASGITransport(create_app(runtime, gr.Blocks()), client=("10.0.0.7", 50_000))
    async with httpx.AsyncClient(transport=transport, base_url=BASE) as client:
        assert (await client.get("/", headers=HTML)).status_code == 200
        yield client


# Headers


async def test_a_cookie_full_of_backslashes_costs_nothing(page: httpx.AsyncClient) -> None:
    """CVE-2024-7592: 15 s of the event loop for 60 KB, on the Pythons that have it. The visitor's own cookie
    beside it still counts."""
    own = "; ".join(f"{name}={value}" for name, value in page.cookies.items())
    page.cookies.clear()
    began = time.process_time()
    for evil in ('a="' + "\\" * 60_000 + '"', 'a="' + "\\a" * 30_000 + '"'):
        assert (await page.get("/profile", headers={"cookie": f"{evil}; {own}"})).status_code == 200
        assert (await page.get("/profile", headers={"cookie": evil})).status_code == 401
    assert time.process_time() - began < 5.0


@pytest.mark.parametrize("host", ["[", "[::1", "a]b["])
@pytest.mark.parametrize("path", ["/", "/healthz", "/v1/models", "/api/memory/feed", "/nowhere"])
async def test_a_malformed_host_is_a_bad_request(page: httpx.AsyncClient, host: str, path: str) -> None:
    for headers in ({"host": host}, {"host": host, **HTML}):
        response = await page.get(path, headers=headers)
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "invalid_host"


@pytest.mark.parametrize("origin", ["http://[", "http://[::1", "null", "\x00", "http://a:b"])
async def test_a_malformed_origin_is_another_site(page: httpx.AsyncClient, origin: str) -> None:
    response = await page.post("/profile/keys", content=b"name=x", headers={"origin": origin})
    assert response.status_code == 403


@pytest.mark.parametrize(
    "headers",
    [{"origin": "http://127.0.0.1:3000"}, {"origin": "http://localhost:7860"}, {"origin": "http://["},
     {"sec-fetch-site": "same-site"}, {"sec-fetch-site": "cross-site"}],
)  # fmt: skip
async def test_another_port_of_this_machine_is_another_site(
    client: httpx.AsyncClient, engine: FakeEngine, headers: dict[str, str]
) -> None:
    """Cookies and host names are the same on every port; what is served there need not be ours."""
    assert (await client.post(URL, json=body(), headers=headers)).status_code == 401
    assert (await client.get("/metrics", headers=headers)).status_code == 403
    assert (await client.get("/api/memory", headers=headers)).status_code in (401, 403)
    assert set((await client.get("/readyz", headers=headers)).json()) == {"state"}
    assert not engine.requests
    own = {"origin": BASE, "sec-fetch-site": "same-origin"}
    assert (await client.get("/metrics", headers=own)).status_code == 200


@pytest.mark.parametrize(
    ("peer", "forwarded", "space", "key"),
    [
        ("10.0.0.7", "", False, "10.0.0.7"),
        ("2001:db8:1:2:3:4:5:6", "", False, "2001:db8:1:2::/64"),
        ("2001:db8:1:2:ffff::1", "", False, "2001:db8:1:2::/64"),
        ("::ffff:10.0.0.7", "", False, "10.0.0.7"),
        ("fe80::1%eth0", "", False, "fe80::/64"),
        ("10.0.0.7", "1.2.3.4", False, "10.0.0.7"),
        ("10.0.0.7", "6.6.6.6, 2001:db8:1:2::9", True, "2001:db8:1:2::/64"),
        ("10.0.0.7", "x" * 9_000, True, "x" * 64),
        (None, "", False, ""),
    ],
)
def test_limits_count_networks_where_addresses_are_free(
    monkeypatch: pytest.MonkeyPatch, peer: str | None, forwarded: str, space: bool, key: str
) -> None:
    monkeypatch.delenv("SPACE_ID", raising=False)
    if space:
        monkeypatch.setenv("SPACE_ID", "somebody/coread")
    headers = [(b"x-forwarded-for", forwarded.encode())] if forwarded else []
    scope = {"type": "http", "headers": headers, "client": (peer, 1) if peer else None}
    assert client_address(Request(scope)) == key


# Sizes


async def test_more_messages_than_tokens_are_refused_unread(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    for model in ("coread", "fake-model"):
        many = [{"role": "user", "content": ""}] * 2_048 + [{"role": "user", "content": "Hi"}]
        refused = await client.post(URL, json=body(model=model, messages=many))
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "context_length_exceeded"
        assert "2,049 messages" in refused.json()["error"]["message"]
    assert not engine.requests


@pytest.mark.parametrize(
    ("start", "one", "count"),
    [
        ("", "0", 1_000),
        ("", "[]", 1_000),
        ('"\\ud83d\\ude42",', "0", 1_000),
        ('"\\ud83d\\ude42",', "[]", 1_000),
    ],
)
async def test_a_long_name_before_many_values_takes_its_own_length_alone(
    client: httpx.AsyncClient, start: str, one: str, count: int
) -> None:
    """A path for each value took 200 MB for these 200 KB; 8 MB are taken."""
    sent = json.dumps(body())[:-1] + ', "{}": [{}{}]}}'.format("k" * 200_000, start, ",".join([one] * count))
    tracemalloc.start()
    try:
        answer = await client.post(URL, content=sent, headers={"content-type": "application/json"})
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert answer.is_success
    assert peak < 20e6


async def test_a_body_is_walked_through_only_where_half_a_pair_can_be(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    walked: list[Any] = []
    monkeypatch.setattr(openai_api, "broken", walked.append)
    assert (await client.post(URL, json=body(metadata={"a": ["é", "\U0001f642"]}))).is_success
    assert not walked
    headers = {"content-type": "application/json"}
    for sent in (json.dumps(body(stop=["\U0001f642"])).encode(), json.dumps(body()).encode("utf-16")):
        assert (await client.post(URL, content=sent, headers=headers)).is_success
    assert len(walked) == 2
    assert (await client.post(URL, content=b"\\ud800", headers=headers)).status_code == 400
    assert (await client.post(URL, content=b"[" * 9_999 + b"\\ud800")).status_code == 400


@pytest.mark.parametrize("wrong", [{"stop": [0] * 20_000}, {"messages": [{}] * 20_000}])
async def test_the_first_wrong_value_of_a_list_ends_its_reading(
    client: httpx.AsyncClient, wrong: dict[str, Any]
) -> None:
    """An error for each held 0.5 KB and said nothing more."""
    with pytest.raises(ValidationError) as refused:
        ChatRequest.model_validate(body(**wrong))
    assert refused.value.error_count() <= 2
    assert (await client.post(URL, json=body(**wrong))).status_code == 400


async def test_what_was_sent_is_said_back_in_short(client: httpx.AsyncClient) -> None:
    part = {"type": "\x00" * 100_000, "text": "x"}
    listed = {"type": [[]] * 100_000, "text": "x"}
    for more in (
        {"model": "\U000e0001" * 100_000},
        {"messages": [{"role": "user", "content": [part]}]},
        {"messages": [{"role": "user", "content": [listed]}]},
        {"k" * 100_000: ["\ud800"]},
    ):
        sent = json.dumps(body(**more)).encode()
        refused = await client.post(URL, content=sent, headers={"content-type": "application/json"})
        assert refused.status_code in (400, 404)
        assert len(refused.content) < 5_000


async def test_a_book_is_no_title_and_is_not_looked_at(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = await runtime.store.create(ANN)
    seen: list[int] = []
    monkeypatch.setattr(store, "one_line", lambda text: seen.append(len(text)) or text)
    with pytest.raises(TitleRefused, match="500,000 characters"):
        await runtime.store.rename(ANN, talk.id, "é" * 500_000)
    assert seen == []
    await runtime.store.rename(ANN, talk.id, "Weir")
    assert seen == [4]
    with pytest.raises(ValueRefused, match="500,000"):
        checked_name("\x00" * 500_000, "A name")


def test_long_conversations_are_encoded_in_proportion() -> None:
    """Each message's text is found once, from where the last one ended; 20,000 take well under a second."""
    texts = [str(n) for n in range(20_000)]
    began = time.process_time()
    ids = MessageEncoder(CharTokenizer()).encode([ChatMessage(role="user", content=t) for t in texts], "a")
    assert time.process_time() - began < 10.0
    text = CharTokenizer().decode(ids)
    assert text.count("<|im_start|>user\n") == len(texts)
    assert text.startswith("<|im_start|>user\n0<|im_end|>\n<|im_start|>user\n1<|im_end|>\n")


async def test_log_probabilities_of_a_whole_answer_have_an_end(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    asked = body(n=16, max_tokens=900, logprobs=True, top_logprobs=20)
    refused = await client.post(URL, json=asked)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "top_logprobs"
    assert "302,400" in refused.json()["error"]["message"]
    assert not engine.requests
    assert (await client.post(URL, json=asked | {"stream": True})).status_code == 200
    assert (await client.post(URL, json=asked | {"n": 1})).status_code == 200


async def test_what_can_never_come_is_a_number(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    least = TokenLogprob(82, -0.5, ((82, -0.5), (83, -math.inf)))
    engine.script = lambda _: [
        Delta(0, "H", (82,), (least,)), Done(0, "stop", "H", (82,), receipt(4, 0, 1))
    ]  # fmt: skip
    for stream in (False, True):
        text = (await client.post(URL, json=body(logprobs=True, top_logprobs=2, stream=stream))).text
        assert "Infinity" not in text
        assert '"logprob":-9999.0' in text


async def test_no_text_ends_a_line_of_a_stream(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    """`str.splitlines`, which some clients read streams with, ends a line at more than a line break."""
    text = "a\x85b\u2028c\u2029d\x0be\x0cf\x1cg\x1dh\x1ei\rj\nk"
    engine.script = lambda _: [Delta(0, text, (82,)), Done(0, "stop", text, (82,), receipt(4, 0, 1))]
    events = events_of((await client.post(URL, json=body(stream=True))).text)
    assert events[-1] == "[DONE]"
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in events[:-1]) == text


# Numbers


async def test_one_persons_requests_have_an_end(
    runtime: Runtime, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "REQUESTS_A_MINUTE", 5)
    transport = httpx.ASGITransport(create_app(runtime, gr.Blocks()), client=("10.0.0.7", 50_000))
    async with httpx.AsyncClient(transport=transport, base_url=BASE) as visitor:
        assert (await visitor.get("/", headers=HTML)).status_code == 200
        codes = [(await visitor.get("/profile")).status_code for _ in range(8)]
        assert codes == [200] * 5 + [429] * 3
        assert int((await visitor.get("/profile")).headers["retry-after"]) >= 1
        visitor.cookies.clear()
        assert (await visitor.get("/", headers=HTML)).status_code == 200
        assert (await visitor.get("/profile")).status_code == 200  # somebody else's are not used up


async def test_messages_have_an_end_and_a_written_answer_is_kept(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "MAX_MESSAGES", 4)
    monkeypatch.setattr(store, "MAX_MESSAGES_EACH", 6)
    kept = runtime.store
    talk = await kept.create(ANN, "Talk")
    for _ in range(2):
        await kept.add_message(ANN, talk.id, None, "user", "Q")
        await kept.add_message(ANN, talk.id, None, "assistant", "A")
    with pytest.raises(QuotaRefused, match="4 messages"):
        await kept.add_message(ANN, talk.id, None, "user", "Q")
    await kept.add_message(ANN, talk.id, None, "assistant", "A")
    other = await kept.create(ANN, "Other")
    await kept.add_message(ANN, other.id, None, "user", "Q")
    with pytest.raises(QuotaRefused, match="delete some"):
        await kept.add_message(ANN, other.id, None, "user", "Q")
    bob = Principal("anonymous", "b-bob")
    own = await kept.create(bob, "Own")
    await kept.add_message(bob, own.id, None, "user", "Q")
    await kept.delete(ANN, talk.id)
    await kept.add_message(ANN, other.id, None, "user", "Q")


async def test_conversations_have_an_end_and_empty_ones_go(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each refused first question leaves an empty one."""
    monkeypatch.setattr(store, "MAX_CONVERSATIONS", 3)
    kept = runtime.store
    talk = await kept.create(ANN)
    await kept.add_message(ANN, talk.id, None, "user", "Q")
    for _ in range(2):
        await kept.create(ANN)
    with pytest.raises(QuotaRefused, match="3 conversations"):
        await kept.create(ANN)
    await kept.create(Principal("anonymous", "b-bob"))
    monkeypatch.setattr(store, "EMPTY_S", -1.0)
    await kept.create(ANN)
    assert [one.id for one in await kept.conversations(ANN)] == [talk.id]


@pytest.mark.parametrize(
    ("headers", "query", "status"),
    [
        ({"x-label": "a" * 60_000}, "", 200),
        ({"x-label": "a" * 70_000}, "", 431),
        ({"x-label": "a" * 40_000, "cookie": "b=" + "c" * 40_000}, "", 431),
        ({"x-label": "a" * 40_000}, "?q=" + "d" * 40_000, 431),
    ],
)
async def test_large_headers_are_refused(
    client: httpx.AsyncClient, headers: dict[str, str], query: str, status: int
) -> None:
    response = await client.get(f"/healthz{query}", headers=headers)
    assert response.status_code == status
    if status == 431:
        assert "the limit is 65,536" in response.json()["error"]["message"]
