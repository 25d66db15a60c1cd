"""Compile every kernel that the launcher can choose, for every supported GPU, without a GPU.

    python -m kernels.aot            the whole matrix; writes docs/kernels.md and bench/results/kernels.json
    python -m kernels.aot --quick    the small matrix of continuous integration; writes nothing

Each kernel is compiled by Triton for the named compute capability, and the machine code is read back:
registers, spills, shared memory, tensor-core instructions, width of the loads. Results are cached under
the hash of what the compiler is given (Triton's own first representation of the kernel, the chip and the
options), so that a second run takes a minute and a change compiles only what it changes. The exit status is
1 where `faults` finds any.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import inspect
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kernels.aot_matrix import Variant, matrix
from kernels.triton_config import SHARED_LIMIT, head_parts

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Report:
    """What the machine code of one variant holds.

    spills: loads and stores of local memory; wide_loads: of 16 bytes; narrow_loads: of 1 or 2 bytes.
    """

    kernel: str
    configuration: str
    capability: str
    registers: int
    spills: int
    shared_bytes: int
    shared_limit: int
    tensor_core: int
    tensor_instruction: str
    wide_loads: int
    narrow_loads: int


def _source(variant: Variant) -> tuple[Any, dict[str, Any]]:
    """Triton's source object and its options: the same arguments as `kernels.triton_backend` passes."""
    from triton.compiler import ASTSource

    from kernels.triton_attention import attention_kernel, merge_kernel
    from kernels.triton_pool import copy_kernel, write_kernel

    first, second = head_parts(variant.head_dim)
    data, on = f"*{variant.dtype}", variant.options
    stored = "*fp8e4nv" if variant.fp8 else data
    sinks = data if on else "constexpr"
    scale = "*fp32" if variant.fp8 else "constexpr"
    unscaled: dict[str, Any] = {} if variant.fp8 else {"key_scale": None, "value_scale": None}
    constants: dict[str, Any] = {} if on else {"sinks": None}
    warps, stages = 4, 2
    if variant.kernel == "attention":
        config = variant.config
        warps, stages = config.warps, config.stages
        kernel = attention_kernel
        types = {"query": data, "output": data, "key_pool": stored, "value_pool": stored}
        types |= {"key_scale": scale, "value_scale": scale}
        types |= {"partial_out": "*fp32", "partial_lse": "*fp32", "sinks": sinks, "arrays": "*i32"}
        types |= dict.fromkeys(["tiles_at", "rows_at", "positions_at", "blocks_at"], "i32")
        types |= dict.fromkeys(["slots", "q_token8", "q_head8"], "i32") | {
            "scale": "fp32",
            "soft_cap": "fp32",
        }
        constants |= unscaled
        constants |= {
            "HAS_SCALES": variant.fp8,
            "KV_HEADS": 8, "GROUP": variant.group, "HEAD_A": first, "HEAD_B": second,
            "BLOCK_SIZE": variant.block_size, "WINDOW": 4096 if on else 0, "HAS_CAP": on, "HAS_SINKS": on,
            "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "PRECISION": "tf32",
        }  # fmt: skip
    elif variant.kernel == "merge":
        kernel = merge_kernel
        warps = 1 if variant.head_dim <= 128 else 2
        types = {"output": data, "partial_out": "*fp32", "partial_lse": "*fp32", "sinks": sinks}
        types |= {"arrays": "*i32", "from_at": "i32", "list_at": "i32"}
        constants |= {"Q_HEADS": 32, "HEAD_A": first, "HEAD_B": second, "HAS_SINKS": on}
    elif variant.kernel == "write":
        kernel = write_kernel
        warps = 1
        constants = {"HEAD_DIM": variant.head_dim, "LANES": 1 << (variant.head_dim - 1).bit_length()}
        constants |= unscaled | {"HAS_SCALES": variant.fp8}
        types = {"key": data, "value": data, "key_pool": stored, "value_pool": stored, "targets": "*i64"}
        types |= {"key_scale": scale, "value_scale": scale}
        types |= dict.fromkeys(["k_token", "k_head", "v_token", "v_head", "slots"], "i32")
    else:
        kernel = copy_kernel
        lanes = 1 << (variant.head_dim * variant.block_size - 1).bit_length()
        constants = {"HEAD_DIM": variant.head_dim, "BLOCK_SIZE": variant.block_size, "LANES": lanes}
        types = {"pools": "*i64", "example": "*u8" if variant.fp8 else data, "copies": "*i32", "slots": "i32"}
    signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
    # What the launcher guarantees is aligned, and so is specialised at run time as well.
    loose = {"key", "value"} if variant.kernel == "write" else set()
    attributes = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*") and name not in loose
    }
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places, attrs=attributes)
    return source, {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}


def compile_variant(variant: Variant) -> Report:
    """Compile one variant and read its machine code; raises what Triton raises where it cannot."""
    import triton
    from triton.backends.compiler import GPUTarget

    warnings.simplefilter("ignore")
    source, options = _source(variant)
    major, minor = variant.capability
    kernel = triton.compile(source, target=GPUTarget("cuda", 10 * major + minor, 32), options=options)
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = _tool(tools / "cuobjdump", "-res-usage", file.name)
        code = _tool(tools / "nvdisasm", "-c", file.name)
    # "/*0a30*/  @!P0 HMMA.16816.F32.BF16 R4, …": the name follows an address and perhaps a predicate.
    name = r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Za-z0-9_.]+)"
    found = re.findall(name, code, re.MULTILINE)
    instructions = Counter(found)

    def count(pattern: str) -> int:
        return sum(n for name, n in instructions.items() if re.match(pattern, name))

    tensor = [name for name in instructions if re.match(r"(HMMA|HGMMA|UTC\w*MMA|QGMMA)\b", name)]
    names = {re.sub(r"\.(F32|BF16|F16|TF32|GSB\d+|gsb\d+)\b.*", "", name) for name in tensor}
    registers = re.search(r"REG:(\d+)", usage)
    if registers is None:
        raise RuntimeError(f"cuobjdump names no registers: {usage!r}")
    return Report(
        kernel=variant.kernel,
        configuration=variant.configuration,
        capability=f"{major}.{minor}",
        registers=int(registers[1]),
        spills=count(r"(STL|LDL)\b"),
        shared_bytes=int(kernel.metadata.shared),
        shared_limit=SHARED_LIMIT[variant.capability],
        tensor_core=sum(instructions[name] for name in tensor),
        tensor_instruction=" ".join(sorted(names)),
        wide_loads=count(r"(LDG|LDGSTS)\b.*\.128\b"),
        narrow_loads=count(r"LDG\b.*\.(U8|S8|U16|S16)\b"),
    )


def _tool(program: Path, *arguments: str) -> str:
    done = subprocess.run([str(program), *arguments], capture_output=True, text=True, check=True)
    return done.stdout


def faults(report: Report, *, products: int = 2) -> list[str]:
    """What is wrong with a compiled kernel: an empty list is what we want.

    `products`: matrix products a turn of the loop, each of which must have become tensor-core work.
    """
    found = []
    if report.spills:
        found.append(f"{report.spills} spill instructions")
    if report.shared_bytes > report.shared_limit:
        found.append(f"{report.shared_bytes} bytes of shared memory of {report.shared_limit}")
    if report.kernel == "attention":
        if report.tensor_core < products:
            found.append(f"{report.tensor_core} tensor-core instructions for {products} products")
        if not report.wide_loads:
            found.append("no 16-byte loads")
        if report.narrow_loads > 16:  # sinks are read one by one; keys and values never are
            found.append(f"{report.narrow_loads} loads of one element")
    return found


def _cache_key(variant: Variant) -> str:
    """Of all that decides the machine code: changed comments, or code for other variants, change nothing."""
    import triton
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend

    source, options = _source(variant)
    major, minor = variant.capability
    target = GPUTarget("cuda", 10 * major + minor, 32)
    backend = make_backend(target)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    parsed = backend.parse_options(options)
    module = source.make_ir(
        target, parsed, backend.get_codegen_implementation(parsed), backend.get_module_map(), context
    )
    # Places in the source (`loc(…)`, and their definitions) are no part of the code.
    code = re.sub(r"\s*loc\(#\w+\)|^#loc.*$", "", str(module), flags=re.MULTILINE)
    parts = (triton.__version__, target, sorted(options.items()), SHARED_LIMIT[variant.capability], code)
    digest = hashlib.sha256(repr(parts).encode())
    digest.update(inspect.getsource(compile_variant).encode())
    digest.update(variant.configuration.encode())
    return digest.hexdigest()[:32]


def _cached(arguments: tuple[Variant, Path]) -> Report:
    variant, cache = arguments
    path = cache / f"{_cache_key(variant)}.json"
    if path.exists():
        return Report(**json.loads(path.read_text()))
    report = compile_variant(variant)
    cache.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(report)))
    return report


def _compile_mode() -> None:
    os.environ["TRITON_INTERPRET"] = "0"


def run(variants: list[Variant], *, workers: int, cache: Path) -> Iterable[Report]:
    """Reports in the order of the variants, compiled in parallel."""
    context = multiprocessing.get_context("spawn")  # Triton decides at import whether it interprets
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_compile_mode) as pool:
        yield from pool.map(_cached, [(variant, cache) for variant in variants])


def table(reports: list[Report]) -> str:
    lines = [
        "| kernel | configuration | chip | registers | spills | shared KiB (limit) "
        "| tensor-core instructions | 16-byte loads |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in reports:
        lines.append(
            f"| {r.kernel} | {r.configuration} | {r.capability} | {r.registers} | {r.spills} "
            f"| {r.shared_bytes / 1024:.1f} ({r.shared_limit // 1024}) "
            f"| {r.tensor_core} {r.tensor_instruction} | {r.wide_loads} |"
        )
    return "\n".join(lines)


MARKERS = ("<!-- table: begin -->", "<!-- table: end -->")


def main(arguments: list[str] | None = None) -> int:
    """See the module's text. Returns the exit status: 0 right, 1 faults, 2 nothing to compile with."""
    parser = argparse.ArgumentParser(description="Compile all Triton kernels ahead of time and check them.")
    parser.add_argument("--quick", action="store_true", help="small matrix, nothing written")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "coread" / "kernels"
    parser.add_argument("--cache", type=Path, default=default)
    options = parser.parse_args(arguments)
    if importlib.util.find_spec("triton") is None:
        print("The package triton is not installed (there is one for Linux only): nothing was compiled.")
        return 2
    variants = matrix(quick=options.quick)
    reports: list[Report] = []
    bad = 0
    for report in run(variants, workers=options.workers, cache=options.cache):
        reports.append(report)
        wrong = faults(report)
        bad += bool(wrong)
        print(f"{report.capability} {report.kernel:10} {report.configuration:60} {'; '.join(wrong) or 'ok'}")
        sys.stdout.flush()
    print(f"{len(reports)} kernels, {bad} with faults")
    if not options.quick:
        results = ROOT / "bench" / "results" / "kernels.json"
        results.parent.mkdir(parents=True, exist_ok=True)
        results.write_text(json.dumps([asdict(r) for r in reports], indent=1) + "\n")
        page = ROOT / "docs" / "kernels.md"
        text = page.read_text()
        before, rest = text.split(MARKERS[0])
        after = rest.split(MARKERS[1])[1]
        page.write_text(f"{before}{MARKERS[0]}\n{table(reports)}\n{MARKERS[1]}{after}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
