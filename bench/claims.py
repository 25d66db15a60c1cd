"""The claims this project started from, as a table: `python -m bench.claims [--json] [--quick] [--out FILE]`.

Everything is counted by the engine that serves: its pool, prefix tree, scheduler, ledger and step loop.
`bench/README.md` says what each figure means.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench import memory_claims, policies
from bench.memory_claims import BUDGET_SLOTS, MemoryResult
from bench.policies import BLOCK, RESERVATION, Policy
from bench.trace import Trace, load

ALL = (
    policies.CONTIGUOUS,
    policies.PAGED,
    policies.SHARED,
    policies.IDEAL,
    policies.IDEAL_SHARED,
)
SERVED = ALL[:3]


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured."""

    memory_chats: int
    memory_slots: int
    model_chats: int
    model_documents: int
    model_turns: int
    model_reservations: int
    #: Documents of the two-reader part: (model, tokens).
    documents: tuple[tuple[str, int], ...]
    model: str


FULL = Size(960, BUDGET_SLOTS, 20, 2, 3, 2, (("mechanics", 10_000), ("packaged", 7_000)), "packaged")
#: Small enough for CI: every part runs, on a random model; only directions mean anything.
QUICK = Size(32, 32_768, 5, 2, 1, 2, (("mechanics", 10_000),), "mechanics")


def measure(
    size: Size, *, jobs: int = 1, threads: int | None = None, with_model: bool = True
) -> dict[str, Any]:
    """Run all parts; the result is what `--json` prints."""
    trace = load()
    part = Trace(trace.seed, trace.instructions, trace.documents, trace.chats[: size.memory_chats])
    memory = _memory(part, size.memory_slots, jobs)
    contiguous, paged, shared = (memory[policy.name] for policy in SERVED)
    out: dict[str, Any] = {
        "utilisation_contiguous": contiguous.utilisation,
        "utilisation_paged": paged.utilisation,
        "utilisation_shared": shared.utilisation,
        "waste_tokens_per_sequence": paged.waste_tokens,
        "waste_tokens_per_sequence_shared": shared.waste_tokens,
        "sequences_contiguous": contiguous.peak_sequences,
        "sequences_paged": paged.peak_sequences,
        "sequences_shared": shared.peak_sequences,
        "saved_gib_70b": shared.saved_gib,
        "conditions": {
            "chats": len(part.chats),
            "answers": part.requests(),
            "mean_final_tokens": part.mean_final_length(),
            "reservation": RESERVATION,
            "budget_slots": size.memory_slots,
            "block_size": BLOCK,
            "step_tokens": memory_claims.LIMITS.max_batch_tokens,
            "shape_70b": {"layers": 80, "kv_heads": 8, "head_dim": 128, "itemsize": 2},
            "quick": size is QUICK,
            "python": platform.python_version(),
            "cpus": os.cpu_count(),
            "load_average": os.getloadavg() if hasattr(os, "getloadavg") else None,
        },
        "memory": {name: result.as_dict() for name, result in memory.items()},
    }
    if with_model:
        out |= _with_model(trace, size, threads)
    return out


def _memory(trace: Trace, slots: int, jobs: int) -> dict[str, MemoryResult]:
    if jobs == 1:
        results: Iterable[MemoryResult] = [memory_claims.play(trace, p, slots=slots) for p in ALL]
        return {result.policy: result for result in results}
    # The longest ones first.
    order: list[Policy] = list(reversed(ALL))
    with ProcessPoolExecutor(jobs) as pool:
        results = pool.map(partial(memory_claims.play, trace, slots=slots), order)
        found = {result.policy: result for result in results}
    return {policy.name: found[policy.name] for policy in ALL}


def _with_model(trace: Trace, size: Size, threads: int | None) -> dict[str, Any]:
    # Imported here: the parts without a model need not wait for torch's models.
    import torch

    from bench.model_claims import mechanics, packaged, throughput, two_users

    if threads is not None:
        torch.set_num_threads(threads)

    def model(name: str) -> Any:
        return packaged(threads) if name == "packaged" else mechanics()

    sample = trace.sample(size.model_chats, documents=size.model_documents, max_turns=size.model_turns)
    served = model(size.model)
    speed = {p.name: throughput(served, p, sample, reservations=size.model_reservations) for p in SERVED}
    pairs = {f"{name}_{tokens // 1000}k": two_users(model(name), tokens) for name, tokens in size.documents}
    out: dict[str, Any] = {f"throughput_{p.name}": speed[p.name].requests_per_s for p in SERVED}
    for key, pair in pairs.items():
        name = "two_users_" + key.rsplit("_", 1)[1]
        out[f"{name}_blocks"] = pair.blocks
        out[f"{name}_unshared_blocks"] = pair.unshared_blocks
    return out | {
        "throughput_model": served.description,
        "throughput_threads": torch.get_num_threads(),
        "throughput_sample": {
            "chats": len(sample.chats),
            "answers": sample.requests(),
            "mean_final_tokens": sample.mean_final_length(),
            "documents": size.model_documents,
        },
        "throughput": {name: result.as_dict() for name, result in speed.items()},
        "two_users": {key: pair.as_dict() for key, pair in pairs.items()},
    }


def _row(*cells: object) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def _table(head: tuple[str, ...], rows: Iterable[tuple[object, ...]]) -> list[str]:
    return [_row(*head), _row(*("---" for _ in head)), *(_row(*row) for row in rows), ""]


def tables(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    conditions, memory = result["conditions"], result["memory"]
    base = memory["contiguous"]["peak_sequences"]
    titles = {policy.name: policy.title for policy in ALL}
    lines = [
        f"### Memory: {conditions['chats']} chats, {conditions['answers']:,} answers, mean final length "
        f"{conditions['mean_final_tokens']:,.0f} tokens; {conditions['budget_slots']:,} token slots, "
        f"reservation {conditions['reservation']:,} (virtual time, no model)",
        "",
        *_table(
            (
                "",
                "utilisation",
                "inside steps",
                "waste/sequence",
                "inside steps",
                "peak sequences",
                "× contiguous",
                "mean sequences",
                "preemptions",
                "prompt tokens skipped",
            ),
            (
                (
                    titles[name],
                    f"{r['utilisation']:.2%}",
                    f"{r['utilisation_inside']:.2%}",
                    f"{r['waste_tokens']:,.2f}",
                    f"{r['waste_tokens_inside']:,.1f}",
                    f"{r['peak_sequences']:,}",
                    f"{r['peak_sequences'] / base:.1f}",
                    f"{r['mean_sequences']:,.0f}",
                    f"{r['preemptions']:,}",
                    f"{r['prompt_tokens_skipped'] / r['prompt_tokens']:.1%}",
                )
                for name, r in memory.items()
            ),
        ),
        "Saved by sharing at the peak, for 80 layers, 8 KV heads of 128, bfloat16 (320 KiB a token; "
        f"accounting only): **{result['saved_gib_70b']:,.0f} GiB** that page tables name more than once.",
        "",
    ]
    if "throughput" in result:
        lines += _model_tables(result, titles)
    return "\n".join(lines)


def _model_tables(result: dict[str, Any], titles: dict[str, str]) -> list[str]:
    sample, speed = result["throughput_sample"], result["throughput"]
    base = speed["contiguous"]
    return [
        f"### Throughput: {result['throughput_model']} {sample['chats']} chats, {sample['answers']} answers, "
        f"mean final length {sample['mean_final_tokens']:,.0f} tokens, {sample['documents']} documents; "
        f"{base['pool_slots']:,} token slots ({base['pool_bytes'] / 2**20:,.0f} MiB), "
        f"{result['throughput_threads']} threads",
        "",
        *_table(
            (
                "",
                "requests/s",
                "× contiguous",
                "output tokens/s",
                "peak sequences",
                "refused",
                "prompt tokens computed",
                "TTFT p50 s",
                "wall s",
            ),
            (
                (
                    titles[name],
                    f"{r['requests_per_s']:.3f}",
                    f"{r['requests_per_s'] / base['requests_per_s']:.2f}",
                    f"{r['output_tokens_per_s']:.1f}",
                    r["peak_sequences"],
                    r["refused"] + r["failed"],
                    f"{r['prompt_tokens_computed']:,}",
                    f"{r['ttft_p50_s']:.1f}",
                    f"{r['seconds']:.0f}",
                )
                for name, r in speed.items()
            ),
        ),
        "### Two readers of one document",
        "",
        *_table(
            (
                "model",
                "document",
                "blocks",
                "allowed",
                "unshared",
                "MiB",
                "unshared",
                "copied bytes",
                "prompt tokens computed",
                "same answers",
            ),
            (
                (
                    r["model"] + (" (mechanics)" if key.startswith("mechanics") else ""),
                    f"{r['document_tokens']:,}",
                    r["blocks"],
                    r["bound_blocks"],
                    r["unshared_blocks"],
                    f"{r['bytes'] / 2**20:,.1f}",
                    f"{r['unshared_bytes'] / 2**20:,.1f}",
                    f"{r['bytes_copied']:,}",
                    f"{r['computed_prompt_tokens']:,} instead of {r['unshared_computed_prompt_tokens']:,}",
                    "yes" if r["same_answers"] else "no",
                )
                for key, r in result["two_users"].items()
            ),
        ),
    ]


def main(argv: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.claims", description="Measure the claims.")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--quick", action="store_true", help="a small version: directions only")
    parser.add_argument("--no-model", action="store_true", help="leave out what needs a model")
    parser.add_argument("--out", type=Path, help="also write the JSON to this file")
    parser.add_argument("--jobs", type=int, default=1, help="processes for the part in virtual time")
    parser.add_argument("--threads", type=int, help="threads of the model (default: torch's)")
    arguments = parser.parse_args(argv)
    if arguments.jobs < 1:
        parser.error(f"--jobs is {arguments.jobs}; it must be at least 1")
    result = measure(
        QUICK if arguments.quick else FULL,
        jobs=arguments.jobs,
        threads=arguments.threads,
        with_model=not arguments.no_model,
    )
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1) if arguments.json else tables(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
