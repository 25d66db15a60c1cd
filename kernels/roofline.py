"""What a decode step's attention must move and compute, by formula, and the time a card needs for that.

An independent model: nothing here looks at a plan. The tests hold the plan's counters against it, so a
plan that silently reads more than it should cannot pass. The times are lower bounds from data-sheet rates
("roofline", Williams et al. 2009), not measurements.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Card:
    """Data-sheet rates: bytes per second of memory, dense bfloat16 operations per second."""

    name: str
    bandwidth: float
    operations: float


#: NVIDIA data sheets; L4 and A10G without sparsity, H200 is the SXM card.
CARDS = (
    Card("L4", 300e9, 121e12),
    Card("A10G", 600e9, 70e12),
    Card("A100 80 GB", 2039e9, 312e12),
    Card("H100", 3350e9, 989e12),
    Card("H200", 4800e9, 989e12),
)


@dataclass(frozen=True, slots=True)
class Heads:
    """Attention shape of a model. `itemsize`: bytes of a KV element."""

    name: str
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    itemsize: int = 2

    @property
    def token_bytes(self) -> int:
        """K and V of one token in one layer."""
        return 2 * self.kv_heads * self.head_dim * self.itemsize


SMOLLM2 = Heads("SmolLM2-135M", 30, 9, 3, 64)
LLAMA3_8B = Heads("Llama-3-8B", 32, 32, 8, 128)
QWEN3_8B = Heads("Qwen3-8B", 36, 32, 8, 128)
SHAPES = (SMOLLM2, LLAMA3_8B, QWEN3_8B)


@dataclass(frozen=True, slots=True)
class Decode:
    """`readers` sequences decode one token each: `shared` tokens in common, `own` tokens each."""

    readers: int
    shared: int
    own: int

    @property
    def tokens_one_phase(self) -> int:
        """KV tokens read a layer when every sequence reads its whole context."""
        return self.readers * (self.shared + self.own)

    @property
    def tokens_two_phase(self) -> int:
        """KV tokens read a layer when the shared part is read once."""
        return self.shared + self.readers * self.own


@dataclass(frozen=True, slots=True)
class Cost:
    """One layer. Operations count a multiply and an add as two."""

    bytes: int
    operations: int

    def seconds(self, card: Card) -> float:
        """The larger of the two lower bounds."""
        return max(self.bytes / card.bandwidth, self.operations / card.operations)


def decode_cost(heads: Heads, work: Decode, *, shared_pass: bool) -> Cost:
    """KV, query and output bytes and the operations of both products, for one layer of one step.

    Partial results (float32, a small part of the KV wherever a split is worth it) are left out.
    """
    tokens = work.tokens_two_phase if shared_pass else work.tokens_one_phase
    queries = 2 * work.readers * heads.q_heads * heads.head_dim * heads.itemsize
    operations = 4 * heads.q_heads * heads.head_dim * work.tokens_one_phase
    return Cost(tokens * heads.token_bytes + queries, operations)


def table() -> str:
    """Markdown: attention of one decode step, all layers, in microseconds; 64 readers of 8,192 tokens."""
    cases = [Decode(64, round(8192 * share), 8192 - round(8192 * share)) for share in (0.0, 0.5, 0.9, 0.99)]
    lines = [
        "| model | shared | KV read | " + " | ".join(card.name for card in CARDS) + " | at most |",
        "|---|---|---|" + "---|" * (len(CARDS) + 1),
    ]
    for heads in SHAPES:
        for case in cases:
            two = decode_cost(heads, case, shared_pass=True)
            one = decode_cost(heads, case, shared_pass=False)
            times = [f"{heads.layers * two.seconds(card) * 1e6:,.0f}" for card in CARDS]
            gain = one.seconds(CARDS[-1]) / two.seconds(CARDS[-1])
            lines.append(
                f"| {heads.name} | {case.shared / 8192:.0%} | {heads.layers * two.bytes / 2**30:.2f} GiB | "
                + " | ".join(times)
                + f" | {gain:.1f} x |"
            )
    return "\n".join(lines)
