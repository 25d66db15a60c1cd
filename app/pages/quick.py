"""What Gradio does for outputs that do not change: nothing; and for those that do: all of it.

An event of the page names all the components that it may change, and changes one or two of them ten times a
second while an answer is written. For each of the others Gradio makes the component anew and describes it in
JSON schema, twice: 13 ms of the event loop for every piece of an answer (gradio 6.31, fifteen outputs, idle
core) where 0.02 ms will do. With two dozen answers at a time nothing was left for pages or engine.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import gradio as gr

_SKIP = MappingProxyType(gr.skip())


def _is_skip(value: Any) -> bool:
    return isinstance(value, Mapping) and value == _SKIP


def skip_cheaply(demo: gr.Blocks) -> None:
    """Let `demo` leave alone what an event leaves alone. What reaches the browser stays the same."""
    whole = demo.postprocess_data

    async def postprocess_data(block_fn: Any, predictions: Any, state: Any) -> list[Any]:
        outputs = list(block_fn.outputs)
        values = _values(outputs, predictions)
        if block_fn.batch or values is None:
            return await whole(block_fn, predictions, state)
        out: list[Any] = [None if output.stateful else dict(_SKIP) for output in outputs]
        changed = [i for i, value in enumerate(values) if not _is_skip(value)]
        if changed:
            part = copy.copy(block_fn)
            part.outputs = [outputs[i] for i in changed]
            given = [values[i] for i in changed]
            # A function with one output returns its value bare.
            made = await whole(part, given[0] if len(given) == 1 else given, state)
            for i, value in zip(changed, made, strict=True):
                out[i] = value
        return out

    demo.postprocess_data = postprocess_data  # type: ignore[method-assign]


def keep_updates_apart(demo: gr.Blocks) -> None:
    """Let no update be lost in a browser that is behind.

    Of a stream Gradio sends what has changed since the last message, and its client changes the last
    message's own objects accordingly (gradio 6.31, `apply_diff`): where the page has not yet shown that
    message, it shows its successor twice. A text that grows comes to no harm by it. But an update such as
    "this button is now Stop" that is followed by "leave it alone" is gone, and the button never comes. An
    update is therefore sent whole whenever it is another than before.

    When a stream has ended, Gradio sends its last update once more. That may come after what a person has
    typed since, or after what another event has changed, and write over both: here the end changes nothing.
    """
    whole = demo.handle_streaming_diffs

    def handle_streaming_diffs(
        block_fn: Any,
        data: list[Any],
        session_hash: str | None,
        run: str | None,
        final: bool,
        simple_format: bool = False,
    ) -> list[Any]:
        if final and not simple_format:
            whole(block_fn, data, session_hash, run, final)
            return [dict(_SKIP) for _ in data]
        runs = {} if session_hash is None else demo.pending_diff_streams.get(session_hash, {})
        before = None if run is None else runs.get(run)
        if before is None or simple_format:
            return whole(block_fn, data, session_hash, run, final, simple_format)
        before, now = list(before), list(data)
        sent = whole(block_fn, data, session_hash, run, final, simple_format)
        for i, (old, new) in enumerate(zip(before, now, strict=False)):
            if isinstance(old, dict) and old != new:
                sent[i] = [["replace", [], new]]
        return sent

    demo.handle_streaming_diffs = handle_streaming_diffs  # type: ignore[method-assign]


def _values(outputs: list[Any], predictions: Any) -> list[Any] | None:
    """One value for each output, or None for a form that is left to Gradio."""
    if len(outputs) < 2:
        return None
    if _is_skip(predictions):
        return [_SKIP] * len(outputs)
    if isinstance(predictions, dict):
        if not predictions or any(key not in outputs for key in predictions):
            return None
        return [predictions.get(output, _SKIP) for output in outputs]
    if isinstance(predictions, list | tuple) and len(predictions) == len(outputs):
        return list(predictions)
    return None
