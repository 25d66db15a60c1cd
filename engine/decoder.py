"""From token ids to hidden states and logits: the step's arithmetic behind one call.

`TransformersDecoder` runs the model's own modelling code and is what every other implementation is
measured against. A faster one for a known architecture takes its place at load, never during service.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.bridge import CONTEXT, StepContext
from engine.errors import ModelRefused


@dataclass(frozen=True, slots=True)
class DecoderOutput:
    """`hidden` `[T, width]`: the last layer's states, valid until the decoder is called again; `logits`
    `[R, vocab]`: of the wanted rows only, float32."""

    hidden: Tensor
    logits: Tensor


class Decoder(Protocol):
    """One forward pass over a packed batch."""

    name: str

    def __call__(self, ids: Tensor, positions: Tensor, wanted: Tensor, context: StepContext) -> DecoderOutput:
        """Compute all layers for `ids` `[T]` at `positions` `[T]` (int64), writing and reading pages through
        `context`, and the logits of the rows in `wanted` `[R]` (R may be 0).

        Runs under `torch.inference_mode`. Raises `ModelRefused` for what the attention cannot compute.
        """
        ...


class TransformersDecoder:
    """The model as transformers wrote it, with attention over pages."""

    name = "transformers"

    def __init__(self, model: Any) -> None:
        self._model = model
        self._layers = int(model.config.get_text_config(decoder=True).num_hidden_layers)
        self._hidden: Tensor | None = None
        # The states before the head tell whether a row that does not sample is finite. Hooking them keeps the
        # head itself (scaling, soft-caps, biases) the model's own.
        model.base_model.register_forward_hook(self._keep_hidden)

    def _keep_hidden(self, module: Any, args: Any, output: Any) -> None:
        self._hidden = output[0]

    def __call__(self, ids: Tensor, positions: Tensor, wanted: Tensor, context: StepContext) -> DecoderOutput:
        try:
            output = self._model(
                input_ids=ids[None],
                position_ids=positions[None],
                use_cache=False,
                logits_to_keep=wanted,
                **{CONTEXT: context},
            )
            hidden = self._hidden
        finally:
            self._hidden = None
        if hidden is None or len(context.layers_seen) != self._layers:
            raise ModelRefused(
                f"{type(self._model).__name__} called paged attention in {len(context.layers_seen)} of its "
                f"{self._layers} layers; the others keep state that pages do not hold."
            )
        logits: Tensor = output.logits
        return DecoderOutput(hidden[0], logits[0].to(torch.float32))
