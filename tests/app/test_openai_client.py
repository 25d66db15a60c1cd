"""The official `openai` package against `/v1` over real HTTP: answers, streams, errors, cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import gradio as gr
import openai
import pytest
import uvicorn
from openai import AsyncOpenAI

from app.runtime import Runtime
from app.server import bind, create_app
from engine.errors import ContextTooLong, LimitReached
from engine.types import Delta, Reading
from tests.app.fakes import FakeEngine

ASK: list[Any] = [{"role": "user", "content": "When does the bakery open?"}]


async def until(condition: Callable[[], bool]) -> None:
    """What is waited for happens in code that knows no event of ours."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


@pytest.fixture
async def url(runtime: Runtime) -> AsyncIterator[str]:
    listener = bind("127.0.0.1", 0)
    config = uvicorn.Config(
        create_app(runtime, gr.Blocks()), lifespan="off", log_level="error", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    running = asyncio.create_task(server.serve(sockets=[listener]))
    await until(lambda: server.started)
    yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    server.should_exit = True
    await running
    listener.close()


@pytest.fixture
async def client(url: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=url, api_key="unused", max_retries=0) as made:
        yield made


async def test_models(client: AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["coread", "fake-model"]
    assert (await client.models.retrieve("fake-model")).owned_by == "coread"
    with pytest.raises(openai.NotFoundError, match="not served here"):
        await client.models.retrieve("gpt-4o")


@pytest.mark.parametrize("model", ["coread", "fake-model"])
async def test_a_whole_answer(client: AsyncOpenAI, model: str) -> None:
    answer = await client.chat.completions.create(model=model, messages=ASK, max_tokens=20)
    assert answer.choices[0].message.content == "Hello."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == answer.usage.prompt_tokens // 2


async def test_a_stream_with_usage(client: AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="coread", messages=ASK, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello."
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].choices == []


async def test_the_stream_helper_of_the_package(client: AsyncOpenAI) -> None:
    async with client.chat.completions.stream(model="coread", messages=ASK) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == "Hello."


async def test_several_choices_and_logprobs(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="fake-model", messages=ASK, n=3, logprobs=True, top_logprobs=1, temperature=1.0, seed=7
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content[0].top_logprobs) == 1


async def test_errors_become_the_packages_own(
    client: AsyncOpenAI, engine: FakeEngine, runtime: Runtime, url: str
) -> None:
    create = client.chat.completions.create
    with pytest.raises(openai.NotFoundError, match="not served here"):
        await create(model="gpt-4o", messages=ASK)
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": {}}}
    with pytest.raises(openai.BadRequestError, match="tools is not supported"):
        await create(model="coread", messages=ASK, tools=[tool])
    with pytest.raises(openai.BadRequestError) as invalid:
        await create(model="coread", messages=ASK, n=17)
    assert (invalid.value.code, invalid.value.param) == ("invalid_value", "n")
    engine.refuse = ContextTooLong(5_000, 100, 2_048)
    words = "This model's maximum context length is 2,048 tokens"  # agents' libraries look for them
    with pytest.raises(openai.BadRequestError, match=words) as long:
        await create(model="coread", messages=ASK)
    assert (long.value.code, long.value.param) == ("context_length_exceeded", "messages")
    engine.refuse = LimitReached("waiting requests", 256)
    with pytest.raises(openai.RateLimitError) as busy:
        await create(model="coread", messages=ASK)
    assert int(busy.value.response.headers["retry-after"]) >= 1
    await runtime.keys.create("script")
    async with AsyncOpenAI(base_url=url, api_key="coread_wrong", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError, match="not known here"):
            await stranger.chat.completions.create(model="coread", messages=ASK)


async def test_the_package_retries_after_429_by_itself(
    url: str, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.refuse = LimitReached("waiting requests", 256, 1.0)
    async with AsyncOpenAI(base_url=url, api_key="unused", max_retries=3) as client:
        asking = asyncio.create_task(client.chat.completions.create(model="coread", messages=ASK))
        await asyncio.sleep(0.3)
        engine.refuse = None
        assert (await asking).choices[0].message.content == "Hello."


@pytest.mark.parametrize("how", ["close", "cancel"])
async def test_a_stream_that_is_given_up_frees_the_engine(
    client: AsyncOpenAI, engine: FakeEngine, how: str
) -> None:
    engine.script = [Reading(5, 10, 0), Delta(0, "Half", (80,)), "hold"]
    stream = await client.chat.completions.create(model="coread", messages=ASK, stream=True)

    async def read() -> None:
        async for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content == "Half":
                seen.set()

    seen = asyncio.Event()
    reading = asyncio.create_task(read())
    async with asyncio.timeout(20):
        await seen.wait()
        if how == "close":
            await stream.close()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await stream.close()
        await until(lambda: engine.generations[0].aborted)


async def test_a_whole_answer_that_is_given_up_frees_the_engine(
    client: AsyncOpenAI, engine: FakeEngine
) -> None:
    engine.script = ["hold"]
    with pytest.raises(openai.APITimeoutError):
        await client.with_options(timeout=0.5).chat.completions.create(model="coread", messages=ASK)
    await until(lambda: engine.generations[0].aborted)


async def test_a_failure_in_the_middle_of_a_stream_is_an_error(
    client: AsyncOpenAI, engine: FakeEngine
) -> None:
    from engine.errors import StepFailed
    from tests.app.fakes import failing

    engine.script = failing(StepFailed("The step failed."))
    stream = await client.chat.completions.create(model="coread", messages=ASK, stream=True)
    with pytest.raises(openai.APIError, match="step failed"):
        async for _ in stream:
            pass
