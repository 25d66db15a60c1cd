"""Other people's clients against `/v1`: litellm, langchain-openai, pydantic-ai, the newest `openai`.

    python -m venv ENV && ENV/bin/pip install litellm langchain-openai "pydantic-ai-slim[openai]"
    python -m tests.app.try_clients ENV/bin/python

`try_clients` serves and runs this file with the other Python: these packages are large, ask for versions of
their own, and are no dependency of Coread, so nothing of Coread is imported here. Exit status 1 where a step
did not end as it should. The server's models are `coread`, which searches, and `letters`, which only writes.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import httpx

# Read by the packages when they are imported: no key is needed, and nothing is fetched from the network.
os.environ |= {"OPENAI_API_KEY": "unused", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "NO_PROXY": "*"}

QUESTION = "When does the bakery open?"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
LONG = 2_000  # tokens, so that something is there to be cancelled


class Steps:
    """Runs one step after the other and remembers which failed."""

    def __init__(self, url: str) -> None:
        self.url, self.failed = url, 0
        # One loop for all: langchain keeps connections from one call to the next, and they belong to a loop.
        self._loop = asyncio.Runner()

    def _run(self, work: Callable[[], Any]) -> Any:
        got = work()
        return self._loop.run(got) if inspect.iscoroutine(got) else got

    def _say(self, ok: bool, name: str, what: object) -> None:
        self.failed += not ok
        print("ok  " if ok else "FAIL", name, "->", " ".join(str(what).split())[:120], flush=True)

    def gives(self, name: str, work: Callable[[], Any]) -> None:
        """The step returns something that is not empty."""
        try:
            got = self._run(work)
            self._say(bool(got), name, got)
        except Exception as error:
            self._say(False, name, f"{type(error).__name__}: {error}")

    def refuses(self, name: str, work: Callable[[], Any], kind: type[Exception]) -> None:
        """The step raises the client's own error of this kind."""
        try:
            self._say(False, name, f"no error but {self._run(work)}")
        except kind as error:
            self._say(True, name, f"{type(error).__name__}: {error}")
        except Exception as error:
            self._say(False, name, f"{type(error).__name__}: {error}")

    def frees(self, name: str, work: Callable[[], Any]) -> None:
        """What the step gave up is given up by the engine too, long before it would have ended."""
        try:
            self._run(work)
            for _ in range(100):
                status = httpx.get(f"{self.url}/readyz", trust_env=False).json()
                if not status["running"] and not status["queued"]:
                    return self._say(True, name, "the engine is free again")
                time.sleep(0.05)
            self._say(False, name, f"still at work: {status['running']} running")
        except Exception as error:
            self._say(False, name, f"{type(error).__name__}: {error}")


def litellm_steps(steps: Steps, base: str) -> None:
    import litellm

    litellm.suppress_debug_info = True

    def ask(model: str = "coread", text: str = QUESTION, **more: Any) -> Any:
        messages = [{"role": "user", "content": text}]
        more = {"max_tokens": 24} | more
        return litellm.completion(
            model=f"openai/{model}", api_base=base, api_key="unused", messages=messages, **more
        )

    def text_of(chunks: Any) -> str:
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    async def streamed() -> str:
        chunks = await litellm.acompletion(
            model="openai/coread", api_base=base, api_key="unused", stream=True, max_tokens=24,
            messages=[{"role": "user", "content": QUESTION}],
        )  # fmt: skip
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    def given_up() -> None:
        stream = ask("letters", stream=True, max_tokens=LONG)
        next(stream)
        stream.completion_stream.close()

    usage = {"include_usage": True}
    steps.gives("litellm: an answer", lambda: ask().choices[0].message.content)
    steps.gives("litellm: its usage", lambda: ask().usage.completion_tokens)
    steps.gives("litellm: a stream", lambda: text_of(ask(stream=True)))
    steps.gives("litellm: its usage", lambda: list(ask(stream=True, stream_options=usage))[-1].usage)
    steps.gives("litellm: an asynchronous stream", streamed)
    steps.refuses("litellm: an unknown model", lambda: ask("gpt-4o"), litellm.NotFoundError)
    too_long = litellm.ContextWindowExceededError  # by which agents know to shorten what they send
    steps.refuses("litellm: too long", lambda: ask("letters", "x" * 9_000), too_long)
    steps.refuses("litellm: tools", lambda: ask(tools=[TOOL]), litellm.BadRequestError)
    steps.frees("litellm: a stream that is given up", given_up)


def langchain_steps(steps: Steps, base: str) -> None:
    import openai
    from langchain_openai import ChatOpenAI

    def chat(model: str = "coread", **more: Any) -> Any:
        more = {"max_tokens": 24} | more
        return ChatOpenAI(base_url=base, api_key="unused", model=model, max_retries=0, **more)

    async def streamed(model: str = "coread", **more: Any) -> str:
        return "".join([chunk.content async for chunk in chat(model, **more).astream(QUESTION)])

    async def given_up() -> None:
        seen = asyncio.Event()

        async def read() -> None:
            async for _ in chat("letters", max_tokens=LONG).astream(QUESTION):
                seen.set()

        reading = asyncio.create_task(read())
        await asyncio.wait_for(seen.wait(), 30)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)

    talk = [("system", "Be short."), ("human", "Hi"), ("ai", "Hello."), ("human", QUESTION)]
    schema = {"title": "a", "type": "object", "properties": {"b": {"type": "string"}}}
    steps.gives("langchain: an answer", lambda: chat().invoke(QUESTION).content)
    steps.gives("langchain: its usage", lambda: chat().invoke(QUESTION).usage_metadata)
    steps.gives("langchain: a stream", lambda: "".join(c.content for c in chat().stream(QUESTION)))
    steps.gives(
        "langchain: its usage",
        lambda: [c.usage_metadata for c in chat(stream_usage=True).stream(QUESTION) if c.usage_metadata],
    )
    steps.gives("langchain: four at a time", lambda: len(chat().batch([QUESTION] * 4)) == 4)
    steps.gives("langchain: an asynchronous stream", streamed)
    steps.gives("langchain: a system text and turns", lambda: chat().invoke(talk).content)
    steps.refuses(
        "langchain: an unknown model", lambda: chat("gpt-4o").invoke(QUESTION), openai.NotFoundError
    )
    steps.refuses(
        "langchain: structured output",
        lambda: chat().with_structured_output(schema).invoke(QUESTION), openai.BadRequestError,
    )  # fmt: skip
    steps.frees("langchain: a stream that is given up", given_up)


def pydantic_steps(steps: Steps, base: str) -> None:
    from pydantic_ai import Agent
    from pydantic_ai.exceptions import ModelHTTPError
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    def agent(model: str = "coread", **more: Any) -> Any:
        provider = OpenAIProvider(base_url=base, api_key="unused")
        more = {"model_settings": {"max_tokens": 24}} | more
        return Agent(OpenAIChatModel(model, provider=provider), **more)

    async def answer() -> Any:
        return (await agent(system_prompt="Be short.").run(QUESTION)).output

    async def streamed() -> Any:
        async with agent().run_stream(QUESTION) as run:
            return "".join([text async for text in run.stream_text(delta=True)])

    async def second_turn() -> Any:
        one = agent()
        first = await one.run("Hi")
        return (await one.run(QUESTION, message_history=first.all_messages())).output

    async def with_a_tool() -> Any:
        one = agent()

        @one.tool_plain
        def double(x: int) -> int:
            return 2 * x

        return await one.run(QUESTION)

    async def given_up() -> None:
        async with agent("letters", model_settings={"max_tokens": LONG}).run_stream(QUESTION) as run:
            async for _ in run.stream_text(delta=True):
                break

    steps.gives("pydantic-ai: an answer", answer)
    steps.gives("pydantic-ai: a stream", streamed)
    steps.gives("pydantic-ai: a second turn", second_turn)
    steps.refuses("pydantic-ai: an unknown model", lambda: agent("gpt-4o").run(QUESTION), ModelHTTPError)
    steps.refuses("pydantic-ai: a tool", with_a_tool, ModelHTTPError)
    steps.frees("pydantic-ai: a stream that is given up", given_up)


def openai_steps(steps: Steps, base: str) -> None:
    import openai

    client = openai.OpenAI(base_url=base, api_key="unused", max_retries=0)
    create = client.chat.completions.create
    asked: Any = [{"role": "user", "content": QUESTION}]
    print("openai", openai.__version__)
    steps.gives("openai: an answer", lambda: create(model="coread", messages=asked).choices[0].finish_reason)
    steps.gives("openai: the models", lambda: [model.id for model in client.models.list()])
    steps.gives("openai: one model", lambda: client.models.retrieve("coread").id)
    responses = client.responses.create
    steps.refuses("openai: responses", lambda: responses(model="coread", input="Hi"), openai.NotFoundError)


def main() -> None:
    url = sys.argv[1].rstrip("/")
    steps = Steps(url)
    for part in (litellm_steps, langchain_steps, pydantic_steps, openai_steps):
        part(steps, f"{url}/v1")
    raise SystemExit(1 if steps.failed else 0)


if __name__ == "__main__":
    main()
