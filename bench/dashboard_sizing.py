"""The calculator against real pools: `python -m bench.dashboard_sizing`.

For three settings: how many readers `coread size` says fit, and how many do in the production pool, tree and
scheduler, where all come at one moment and each writes its answer to the end without anybody waiting or being
put back. The real number is looked for without the prediction, by doubling and halving. Nothing is computed
for the readers (`bench.play.VirtualRunner`); a document has been read once before, as it mostly has.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from app.sizing import Workload, fit, known_devices, model_named, pool_blocks_on
from bench.meter import Meter
from bench.play import NoText, VirtualClock, VirtualRunner
from engine.core import EngineCore
from engine.scheduler import Limits
from engine.types import Event, Failed, GenerationRequest, ModelShape, SamplingParams, Scope, Segment

BLOCK = 16
MANY = 100_000
LIMITS = Limits(
    max_batch_tokens=10_000_000, max_running=MANY, max_queued=MANY, max_running_per_principal=MANY,
    max_queued_per_principal=MANY,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Setting:
    """A model on a device (or a pool of so many blocks), and what its readers read and write, in tokens."""

    model: str
    device: str
    common: int
    question: int
    answer: int
    documents: int
    blocks: int = 0

    def pool(self) -> int:
        """Blocks of the pool."""
        return self.blocks or pool_blocks_on(model_named(self.model), known_devices()[self.device], BLOCK)


SETTINGS = (
    Setting("SmolLM2-135M", "2 GiB of KV, as Coread starts", 2_400, 260, 40, 1, blocks=5_825),
    Setting("Llama-3.1-8B", "L4 (24 GB)", 6_000, 460, 40, 1),
    Setting("Qwen3-8B", "A100 (40 GB)", 9_000, 460, 40, 3),
)


def finish_together(setting: Setting, users: int, sharing: bool) -> bool:
    """Whether so many readers all run at once and end without anybody waiting or being put back."""
    clock, problems = VirtualClock(), list[Event]()
    meter = Meter(VirtualRunner(clock))
    core = EngineCore(
        meter, NoText(), shape(setting), num_blocks=setting.pool(), block_size=BLOCK, limits=LIMITS,
        clock=clock, sharing=sharing,
    )  # fmt: skip
    meter.core = core

    def note(event: Event | None) -> None:
        if isinstance(event, Failed):
            problems.append(event)

    def ask(name: str, segments: list[Segment], tokens: int) -> None:
        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
        scope = Scope.account(name)
        core.submit(name, GenerationRequest(segments, sampling, name, name, output_scope=scope), note)

    def document(number: int) -> Segment:
        start = 100 + 9_000 * number
        ids = [start + i % 8_999 for i in range(setting.common)]
        return Segment(ids, Scope.collection("k"), "document", f"document-{number}")

    if sharing:
        for number in range(setting.documents):
            ask(f"before-{number}", [document(number)], 1)
            while core.busy:
                core.step()
    for user in range(users):
        question = Segment(
            [100 + user % 30_000] * setting.question, Scope.account(f"user-{user}"), "question"
        )
        ask(f"user-{user}", [document(user % setting.documents), question], setting.answer)
    core.step()
    if len(core.scheduler.running) < users:
        return False
    while core.busy and not core.scheduler.counters.preemptions and not problems:
        core.step()
    return not core.scheduler.counters.preemptions and not problems


def shape(setting: Setting) -> ModelShape:
    """The model's, with 2 bytes an element."""
    return model_named(setting.model).shape()


def most(fits: Callable[[int], bool]) -> int:
    """The largest number for which `fits` is true, where it is true up to some number and false above it."""
    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _fits(setting: Setting, sharing: bool, users: int) -> bool:
    return finish_together(setting, users, sharing)


def main() -> None:
    """Print a table; exit status 1 where fewer or more fit than was predicted."""
    argparse.ArgumentParser(prog="python -m bench.dashboard_sizing", description=__doc__).parse_args()
    wrong = []
    print(
        "| setting | pool blocks | common + own tokens | paged: predicted, real | shared: predicted, real |"
    )
    print("|---|---|---|---|---|")
    for setting in SETTINGS:
        own = setting.question + setting.answer
        found = fit(shape(setting), BLOCK, setting.pool(), Workload(setting.common, own, setting.documents))
        real = [most(partial(_fits, setting, sharing)) for sharing in (False, True)]
        name = f"{setting.model}, {setting.device}"
        name += f", {setting.documents} documents" if setting.documents > 1 else ""
        print(
            f"| {name} | {setting.pool():,} | {setting.common:,} + {own} "
            f"| {found.paged_users}, {real[0]} | {found.shared_users}, {real[1]} |",
            flush=True,
        )
        if real != [found.paged_users, found.shared_users]:
            wrong.append(name)
    if wrong:
        raise SystemExit("Predicted and real differ: " + "; ".join(wrong))


if __name__ == "__main__":
    main()
