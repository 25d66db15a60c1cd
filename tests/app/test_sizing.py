"""What the calculator predicts, against the real pool and scheduler."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.sizing import GIB, SizingRefused, Workload, estimate, fit, model_named, report, run_size, what_if
from engine.scheduler import Limits
from engine.types import ModelShape, Scope, Segment
from tests.app.small_engine import SHAPE, SmallEngine
from tests.engine.simulation import Simulation

MODEL = ModelShape(layers=2, kv_heads=1, head_dim=3, itemsize=2, max_context=512)
#: pool blocks, block size, tokens in common, question, answer, documents
SETTINGS = [(60, 4, 40, 9, 12, 1), (97, 16, 300, 30, 70, 1), (200, 8, 101, 11, 22, 3)]


def finish_together(
    users: int, blocks: int, size: int, common: int, question: int, answer: int, documents: int, sharing: bool
) -> bool:
    """Whether so many readers, who come at one moment, all write to the end without anybody waiting for
    memory or being put back."""
    sim = Simulation(
        blocks,
        size,
        sharing=sharing,
        limits=Limits(max_batch_tokens=100_000, max_running=1_000, max_queued=1_000),
    )

    def document(n: int) -> Segment:
        return Segment(
            [1_000 * (n + 1) + i for i in range(common)], Scope.collection("k"), "document", f"d{n}"
        )

    if sharing:  # somebody has read each document before
        for n in range(documents):
            sim.submit([document(n)], max_tokens=1)
            sim.drain()
    warm = len(sim.finished)
    for user in range(users):
        own = Segment([10_000 + user] * question, Scope.account(f"u{user}"), "question")
        sim.submit([document(user % documents), own], max_tokens=answer, conversation=f"u{user}")
    sim.step()
    together = len(sim.scheduler.running) == users
    sim.drain()
    assert len(sim.finished) == warm + users
    return together and sim.scheduler.counters.preemptions == 0


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("sharing", [True, False], ids=["shared", "paged"])
def test_as_many_users_fit_as_predicted_and_not_one_more(
    setting: tuple[int, int, int, int, int, int], sharing: bool
) -> None:
    blocks, size, common, question, answer, documents = setting
    found = fit(MODEL, size, blocks, Workload(common, question + answer, documents))
    predicted = found.shared_users if sharing else found.paged_users
    assert predicted > 1
    arguments = (blocks, size, common, question, answer, documents, sharing)
    assert finish_together(predicted, *arguments)
    assert not finish_together(predicted + 1, *arguments)


def test_the_three_ways_are_the_ledgers() -> None:
    """One reader's bytes are what the ledger says of one reader: reserved, unshared."""
    engine = SmallEngine(blocks=64)
    engine.ask("c", document=0, question=1, tokens=13, length=100)
    engine.run_until(lambda: len(engine.done()) == 1)
    row = engine.memory().open["c"]
    found = fit(SHAPE, 16, 64, Workload(120, 7 + 13)).json()
    assert found["paged_bytes"] == row.unshared_bytes
    assert found["contiguous_bytes"] == row.reserved_bytes
    assert found["block_bytes"] == engine.core.ledger.block_bytes
    assert found["document_bytes"] + found["own_bytes"] == found["paged_bytes"]


def test_what_if_is_made_of_the_ledgers_totals() -> None:
    engine = SmallEngine(blocks=64)
    assert what_if(engine.memory()) is None
    for n in range(4):
        engine.ask(f"c{n}", document=0, question=n, tokens=13)
        engine.run(2)
    engine.run_until(lambda: len(engine.done()) == 4)
    engine.fresh()
    snapshot = engine.memory()
    found = what_if(snapshot)
    assert found is not None
    assert found["unshared_bytes"] == snapshot.totals_open.unshared_bytes
    rows = list(snapshot.open.values())
    own = sum(row.blocks - row.shared_blocks for row in rows) / 4
    common = snapshot.totals_open.physical_bytes // snapshot.block_bytes - own * 4
    assert found["shared_users"] == int((64 - common) / own)
    assert found["paged_users"] == int(64 * 4 / sum(row.blocks for row in rows))
    assert found["contiguous_users"] < found["paged_users"] < found["shared_users"]


def test_a_known_model_on_a_known_device() -> None:
    """By hand: Llama 3.1 8B has 2 · 32 · 8 · 128 · 16 · 2 bytes a block, 2 MiB."""
    found = estimate("llama-3.1-8b", 24 * GIB, Workload(6_000, 500))
    assert found["block_bytes"] == 2 << 20
    assert found["pool_blocks"] == (int(24 * GIB * 0.9) - 2 * 8_030_261_248) // (2 << 20)
    assert found["contiguous_users"] == 0
    assert found["shared_users"] == (found["pool_blocks"] - 375) // (407 - 375)


@pytest.mark.parametrize(
    ("model", "memory", "common", "own", "words"),
    [
        ("nope", "24GB", 100, 100, "not known"),
        ("Llama-3.1-70B", "24GB", 100, 100, "weights alone"),
        ("Llama-3.1-8B", "much", 100, 100, "no size"),
        ("Llama-3.1-8B", "24GB", -1, 100, "document_tokens is -1"),
        ("Llama-3.1-8B", "24GB", 100, 0, "own_tokens is 0"),
        ("Llama-3.1-8B", "24GB", 131_000, 100, "131,100"),
    ],
)
def test_what_cannot_be_computed_is_said_with_the_value(
    model: str, memory: str, common: int, own: int, words: str
) -> None:
    with pytest.raises(SizingRefused, match=words):
        run_size(model, memory, common, own, 1)


def test_a_folder_is_read_on_the_command_line_only(tmp_path: Path) -> None:
    config = tmp_path / "small" / "config.json"
    config.parent.mkdir()
    config.write_text(
        '{"num_attention_heads": 9, "num_key_value_heads": 3, "num_hidden_layers": 30, "hidden_size": 576,'
        ' "intermediate_size": 1536, "vocab_size": 49152, "max_position_embeddings": 8192,'
        ' "tie_word_embeddings": true}'
    )
    found = model_named(str(config.parent), files=True)
    known = model_named("SmolLM2-135M")
    assert (found.layers, found.kv_heads, found.head_dim) == (known.layers, known.kv_heads, known.head_dim)
    assert found.parameters == pytest.approx(known.parameters, rel=0.001)
    with pytest.raises(SizingRefused, match="not known"):
        estimate(str(config.parent), 24 * GIB, Workload(100, 100))
    config.write_text('{"num_attention_heads": 0}')
    with pytest.raises(SizingRefused, match="does not describe"):
        model_named(str(config.parent), files=True)
    lines = report(run_size("Qwen2.5-7B", "24GB", 6_000, 500, 2))
    assert any("readers" in line for line in lines)
    # Why so few: a place is as long as the model's context.
    whole = [line.split()[0] for line in lines if "for a whole context of 32,768 tokens" in line]
    assert whole == ["contiguous"]
