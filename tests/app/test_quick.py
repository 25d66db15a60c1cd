"""What an event leaves alone costs nothing, and the browser is told what Gradio would have told it."""

from __future__ import annotations

from typing import Any

import gradio as gr
import pytest
from gradio.state_holder import SessionState

from app.pages.quick import skip_cheaply


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
