"""What an event leaves alone costs nothing, and the browser is told what Gradio would have told it."""

from __future__ import annotations

import copy
import json
from types import SimpleNamespace
from typing import Any

import gradio as gr
import pytest
from gradio.state_holder import SessionState

from app.pages.quick import keep_updates_apart, skip_cheaply


def made() -> tuple[gr.Blocks, list[Any]]:
    with gr.Blocks() as demo:
        state = gr.State(None)
        box, chat = gr.Textbox(), gr.Chatbot()
        radio = gr.Radio(["a", "b"])
        outputs = [state, box, chat, radio]
        gr.Button().click(lambda: None, None, outputs)
    return demo, outputs


def forms(outputs: list[Any]) -> list[Any]:
    state, box, chat, radio = outputs
    talk = [{"role": "user", "content": "Hi"}]
    return [
        gr.skip(),
        {chat: talk},
        {state: "s", box: "text"},
        {box: gr.update(value="x", interactive=False), radio: gr.update(choices=["c"], value="c")},
        {box: gr.update(visible=False)},
        [gr.skip(), gr.skip(), talk, gr.skip()],
        ["s", "text", talk, "a"],
        {box: None},
    ]


@pytest.mark.parametrize("number", range(8))
async def test_the_browser_is_told_the_same(number: int) -> None:
    told = []
    for quick in (False, True):
        demo, outputs = made()
        if quick:
            skip_cheaply(demo)
        state = SessionState(demo)
        said = await demo.postprocess_data(demo.fns[0], forms(outputs)[number], state)
        told.append((said, state.state_data))
    plain = [[_without_models(value) for value in said] for said, _ in told]
    assert plain[0] == plain[1]
    assert list(told[0][1].values()) == list(told[1][1].values())


def _without_models(value: Any) -> Any:
    return value.model_dump() if hasattr(value, "model_dump") else value


async def test_what_is_left_alone_is_not_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    described = []
    update = SessionState._update_config
    monkeypatch.setattr(
        SessionState, "_update_config", lambda self, key: (described.append(key), update(self, key))[1]
    )
    demo, outputs = made()
    skip_cheaply(demo)
    state = SessionState(demo)
    _, box, chat, _ = outputs
    for _ in range(5):
        await demo.postprocess_data(demo.fns[0], gr.skip(), state)
        await demo.postprocess_data(demo.fns[0], {chat: [{"role": "user", "content": "Hi"}]}, state)
    assert described == []
    await demo.postprocess_data(demo.fns[0], {box: gr.update(visible=False)}, state)
    assert described == [box._id]


async def test_an_output_too_many_is_still_a_mistake() -> None:
    demo, outputs = made()
    skip_cheaply(demo)
    with pytest.raises(ValueError, match="output"):
        await demo.postprocess_data(demo.fns[0], ["s", "text"], SessionState(demo))
    with pytest.raises(ValueError, match="not"):
        await demo.postprocess_data(demo.fns[0], {gr.Textbox(): "x"}, SessionState(demo))
    assert outputs


class _Client:
    """Gradio's client: it changes the last message's own objects into the next message."""

    def __init__(self) -> None:
        self._last: list[Any] | None = None
        self.received: list[list[Any]] = []

    def take(self, message: list[Any]) -> None:
        if self._last is None:
            self._last = list(message)
        else:
            self._last = [self._edited(old, edits) for old, edits in zip(self._last, message, strict=True)]
        self.received.append(list(self._last))

    @staticmethod
    def _edited(value: Any, edits: list[Any]) -> Any:
        for action, path, new in edits:
            if not path:
                value = value + new if action == "append" else new
                continue
            within = value
            for step in path[:-1]:
                within = within[step]
            if action in ("replace", "add"):
                within[path[-1]] = new
            elif action == "append":
                within[path[-1]] += new
            else:
                del within[path[-1]]
        return value


@pytest.mark.parametrize("kept", [False, True])
def test_an_update_is_seen_by_a_page_that_is_behind(kept: bool) -> None:
    """A page shows a message only after the next has come; without the remedy it would miss the update."""
    demo, _ = made()
    if kept:
        keep_updates_apart(demo)
    client = _Client()
    stop = {"__type__": "update", "stop_btn": "Stop", "submit_btn": False}
    steps = [
        [gr.skip(), "A", gr.skip()], [stop, "A", gr.skip()], [gr.skip(), "A story", gr.skip()],
        [gr.skip(), "A story", {"__type__": "update", "choices": ["a"]}], [gr.skip(), "Another", gr.skip()],
    ]  # fmt: skip
    expected = copy.deepcopy(steps)
    event = SimpleNamespace(outputs=[None] * 3)
    for step in steps:
        data = copy.deepcopy(step)
        sent = demo.handle_streaming_diffs(event, data, session_hash="ann", run="1", final=False)  # type: ignore[arg-type]
        client.take(json.loads(json.dumps(sent)))
    assert (client.received == expected) is kept
    assert client.received[-1] == expected[-1]  # in the end both are right
    ended = demo.handle_streaming_diffs(event, [None] * 3, session_hash="ann", run="1", final=True)  # type: ignore[arg-type]
    assert ended == ([gr.skip()] * 3 if kept else expected[-1]), "the end writes over nothing"
    assert not demo.pending_diff_streams["ann"]


def test_what_did_not_change_is_not_sent_again() -> None:
    demo, _ = made()
    keep_updates_apart(demo)
    event = SimpleNamespace(outputs=[None] * 2)
    for sent in ([{"a": 1}, "text"], [[], []]):
        data = [{"a": 1}, "text"]
        assert sent == demo.handle_streaming_diffs(event, data, session_hash="ann", run="1", final=False)  # type: ignore[arg-type]
