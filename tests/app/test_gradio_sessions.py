"""Gradio keeps little of each page, and not for ever."""

from __future__ import annotations

import gradio as gr
import pytest
from gradio.state_holder import StateHolder

from app.gradio_sessions import LeanSession, LeanSessions, keep_little, sweep_sessions
from app.streams import EventStreams


@pytest.fixture
def page() -> tuple[gr.Blocks, gr.State, gr.Textbox]:
    with gr.Blocks() as demo:
        state, box = gr.State({"talk": None}), gr.Textbox("empty")
    StateHolder().set_blocks(demo)  # as mounting does
    keep_little(demo)
    return demo, state, box


def test_a_page_keeps_its_state_and_no_description(
    page: tuple[gr.Blocks, gr.State, gr.Textbox],
) -> None:
    demo, state, box = page
    one = demo.state_holder["one"]
    assert type(one) is LeanSession
    one[state._id] = {"talk": 7}
    one[box._id] = gr.Textbox("filled")
    one._update_config(box._id)
    one._update_value_in_config(box._id, "x" * 1_000)
    assert one.config_values == {}
    assert demo.state_holder["one"] is one
    assert one[state._id] == {"talk": 7}
    assert one[box._id].value == "filled"
    other = demo.state_holder["two"]
    assert (other[state._id], other[box._id].value) == ({"talk": None}, "empty")


def test_pages_that_are_gone_are_forgotten(page: tuple[gr.Blocks, gr.State, gr.Textbox]) -> None:
    demo, state, _ = page
    holder, streams = demo.state_holder, EventStreams()
    assert isinstance(holder, LeanSessions)
    for name in ("shown", "waiting", "gone"):
        holder[name][state._id] = {"talk": name}
    with streams.shown("shown"), streams.fetching("waiting"):
        assert sweep_sessions(demo, streams) == 0  # not for so long
        assert sweep_sessions(demo, streams, kept_s=-1.0) == 1
        assert set(holder.session_data) == set(holder.time_last_used) == {"shown", "waiting"}
    assert sweep_sessions(demo, streams, kept_s=-1.0) == 2
    assert holder["shown"][state._id] == {"talk": None}


def test_a_page_is_open_as_long_as_one_of_its_streams() -> None:
    streams = EventStreams()
    with streams.shown("a"):
        with streams.shown("a"), streams.fetching("b"):
            assert streams.is_open("a")
            assert streams.is_open("b")
        assert streams.is_open("a")
        assert not streams.is_open("b")
    assert not streams.is_open("a")
