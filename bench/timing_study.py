"""Can one account tell from the time to its first token what another account has asked?

    python -m bench.timing_study [--guesses 1000] [--json]

In each trial the owner asks something private about a document that both may read. Then somebody asks the
same document with a guess of that text: in half of the trials the guess is right, word for word, in the other
half it is another text of the same length. Two quantities are recorded until the first token: seconds, and
the prompt tokens that the engine had to compute. How well each tells right from wrong guesses is the area
under the ROC curve (Mann-Whitney): 0.5 is chance, 1.0 is certainty.

- `other`: the guesser is another account. Its text has another scope, so nothing of the owner's may be hit.
- `control`: the guesser is the owner itself. Here sharing must show, or the study could see no leak.

A small model with random weights is enough: what is studied is whether work is skipped. Each trial has
texts of its own, so no guess is answered from an earlier one.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import transformers

from engine.core import EngineCore
from engine.kv_pool import KVPool
from engine.model import adopt
from engine.runner import Runner
from engine.scheduler import Limits
from engine.types import Done, Event, GenerationRequest, SamplingParams, Scope, Segment
from kernels.api import get_backend

VOCAB = 500
DOCUMENT_TOKENS = 64
GUESS_TOKENS = 192
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Result:
    """Areas under the ROC curve by seconds and by computed tokens, with the standard error of the former
    under the hypothesis of no difference; `reused_right` is the mean of prompt tokens hit by right ones."""

    guesses: int
    auc_seconds: float
    auc_tokens: float
    standard_error: float
    reused_right: float
    reused_wrong: float


class _Letters:
    """The engine wants a tokenizer for the text of answers; the study does not look at it."""

    all_special_ids: tuple[int, ...] = ()

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return "x" * len(ids)


def area_under_curve(right: Sequence[float], wrong: Sequence[float]) -> float:
    """Probability that a right guess has the smaller value, ties counted half."""
    values = sorted((value, is_right) for is_right, group in ((1, right), (0, wrong)) for value in group)
    smaller, at = 0.0, 0
    wrong_before = 0
    while at < len(values):
        end = at
        while end < len(values) and values[end][0] == values[at][0]:
            end += 1
        tied_right = sum(is_right for _, is_right in values[at:end])
        tied_wrong = end - at - tied_right
        smaller += tied_right * (len(wrong) - wrong_before - tied_wrong + tied_wrong / 2)
        wrong_before += tied_wrong
        at = end
    return smaller / (len(right) * len(wrong))


class Study:
    """One engine, and trials over it."""

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        torch.manual_seed(seed)
        config = transformers.LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
        )
        model = adopt(transformers.LlamaForCausalLM(config), None, name="random weights")
        backend = get_backend("torch_cpu", model.device)
        pool = KVPool(model.shape, 256, BLOCK_SIZE, model.dtype, model.device)
        self.core = EngineCore(
            Runner(model, pool, backend),
            _Letters(),
            model.shape,
            num_blocks=256,
            block_size=BLOCK_SIZE,
            limits=Limits(max_batch_tokens=256),
            clock=time.perf_counter,
            vocab_size=VOCAB,
        )
        self._asked = 0

    def text(self, length: int) -> list[int]:
        """Random tokens."""
        return [self.random.randrange(3, VOCAB) for _ in range(length)]

    def ask(self, account: str, document: list[int], private: list[int]) -> Done:
        """One request of one account to its first token."""
        scope = Scope.account(account)
        self._asked += 1
        events: list[Event | None] = []
        request = GenerationRequest(
            segments=[
                Segment(document, Scope.collection("library"), "document", "d"),
                Segment(private, scope, "question"),
            ],
            sampling=SamplingParams(max_tokens=1, ignore_eos=True),
            principal=account,
            conversation=account,
            output_scope=scope,
        )
        self.core.submit(f"q{self._asked}", request, events.append)
        while self.core.busy:
            self.core.step()
        [done] = [event for event in events if isinstance(event, Done)]
        return done

    def run(self, guesser: str, guesses: int) -> Result:
        """`guesses` trials in random order, half of them right. The owner is the account "owner"."""
        trials = [True] * (guesses // 2) + [False] * (guesses - guesses // 2)
        self.random.shuffle(trials)
        document = self.text(DOCUMENT_TOKENS)
        seconds: dict[bool, list[float]] = {True: [], False: []}
        computed: dict[bool, list[float]] = {True: [], False: []}
        for right in trials:
            private = self.text(GUESS_TOKENS)
            self.ask("owner", document, private)
            receipt = self.ask(guesser, document, private if right else self.text(GUESS_TOKENS)).receipt
            seconds[right].append(receipt.ttft_s if receipt.ttft_s is not None else math.nan)
            computed[right].append(receipt.prompt_tokens - receipt.reused_tokens)
        n, m = len(seconds[True]), len(seconds[False])
        prompt = DOCUMENT_TOKENS + GUESS_TOKENS
        return Result(
            guesses=guesses,
            auc_seconds=area_under_curve(seconds[True], seconds[False]),
            auc_tokens=area_under_curve(computed[True], computed[False]),
            standard_error=math.sqrt((n + m + 1) / (12 * n * m)),
            reused_right=prompt - sum(computed[True]) / n,
            reused_wrong=prompt - sum(computed[False]) / m,
        )


def main() -> None:
    """Run both sides and print them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--guesses", type=int, default=1000, help="trials of each side (at least 2)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    options = parser.parse_args()
    if options.guesses < 2:
        parser.error(f"--guesses is {options.guesses}; each side needs at least 2")
    study = Study(options.seed)
    study.run("owner", 10)  # warm-up
    results = {"other": study.run("guesser", options.guesses), "control": study.run("owner", options.guesses)}
    if options.json:
        print(json.dumps({name: asdict(result) for name, result in results.items()}))
        return
    print(
        f"{options.guesses:,} guesses of {GUESS_TOKENS} private tokens behind a document of {DOCUMENT_TOKENS}"
    )
    print(f"{'guesser':<28}{'AUC by time':>12}{'± (chance)':>12}{'AUC by tokens':>15}{'hit right/wrong':>18}")
    names = {"other": "another account", "control": "the owner (must show)"}
    for name, result in results.items():
        hits = f"{result.reused_right:.1f} / {result.reused_wrong:.1f}"
        print(
            f"{names[name]:<28}{result.auc_seconds:>12.3f}{1.96 * result.standard_error:>12.3f}"
            f"{result.auc_tokens:>15.3f}{hits:>18}"
        )


if __name__ == "__main__":
    main()
