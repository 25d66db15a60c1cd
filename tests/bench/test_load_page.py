"""A measuring reader speaks as the page's own script does."""

from __future__ import annotations

import httpx

from app.dashboard.feed import Asked
from bench.load_page import Measured, Page


async def test_a_reader_says_what_it_has_as_the_feed_understands_it() -> None:
    asked: list[Asked] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(Asked.of(dict(request.url.params)))
        return httpx.Response(200, json={"keys": ["s1", "f2", "m3"]})

    page = Page("http://test", Measured())
    await page.http.aclose()
    page.http = httpx.AsyncClient(base_url="http://test", transport=httpx.MockTransport(answer))
    await page.memory()
    await page.memory()
    await page.close()
    assert asked[1].have == {"s1", "f2", "m3"}
