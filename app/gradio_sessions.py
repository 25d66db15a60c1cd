"""What Gradio keeps of each page that was ever opened: little, and not for ever.

Gradio describes the whole layout anew for every page load, writes each value that the page shows into that,
and keeps it, for deep links, until ten thousand other pages have come. Deep links are closed here
(`app.gate`), so nothing reads it. What is left, the page's own state, goes once the page has been gone for an
hour.
"""

from __future__ import annotations

import asyncio
import datetime
from typing import Any

import gradio as gr
from gradio.state_holder import SessionState, StateHolder

from app.streams import EventStreams

#: As long as Gradio itself keeps the state of a closed page.
KEPT_S = 3600.0


class LeanSession(SessionState):
    """A page's state without the description of its layout."""

    @property
    def config_values(self) -> dict[int, Any]:
        """Of nothing; what is written into it is gone at once."""
        return {}

    @config_values.setter
    def config_values(self, value: dict[int, Any]) -> None:
        """Kept by nobody."""

    def _update_config(self, key: int) -> None:
        """Nothing is described."""

    def _update_value_in_config(self, key: int, value: Any) -> None:
        """Nothing is described."""


class LeanSessions(StateHolder):
    """Gradio's table of pages, of lean ones."""

    def __getitem__(self, session_id: str) -> SessionState:
        if session_id not in self.session_data:
            self.session_data[session_id] = LeanSession(self.blocks)
        return super().__getitem__(session_id)

    def sweep(self, streams: EventStreams, kept_s: float = KEPT_S) -> int:
        """Forget pages that are gone and were last used so long ago; how many."""
        before = datetime.datetime.now() - datetime.timedelta(seconds=kept_s)
        with self.lock:
            old = [h for h, at in self.time_last_used.items() if at < before and not streams.is_open(h)]
            for hash in old:
                self.session_data.pop(hash, None)
                del self.time_last_used[hash]
        return len(old)


def keep_little(demo: gr.Blocks) -> None:
    """Make the table of a mounted `demo` a lean one."""
    demo.state_holder.__class__ = LeanSessions


def sweep_sessions(demo: gr.Blocks, streams: EventStreams, kept_s: float = KEPT_S) -> int:
    """`LeanSessions.sweep` of a `demo` that is mounted."""
    holder = demo.state_holder
    return holder.sweep(streams, kept_s) if isinstance(holder, LeanSessions) else 0


async def sweep_sessions_forever(demo: gr.Blocks, streams: EventStreams, every_s: float = 60.0) -> None:
    """`sweep_sessions` again and again until cancelled."""
    while True:
        await asyncio.sleep(every_s)
        sweep_sessions(demo, streams)
