"""After warm-up no batch makes Triton compile again.

Triton's own argument specialisation runs here against a stand-in for the GPU's driver; only the compiler
behind it is replaced by a counter. It needs a process of its own: in this one the interpreter is on.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CHILD = '''
import random
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction


class NoGpu:
    """Answers what JITFunction asks before it compiles."""
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0


compiled = []

def count(self, key, signature, device, constexprs, options, attrs, warmup):
    compiled.append((self.fn.__name__, key))
    kernel = object()
    self.device_caches[device][0][key] = kernel
    return kernel

JITFunction._do_compile = count
driver.set_active(NoGpu())
import kernels.triton_backend as tb

def specialise(kernel, grid, *arguments, **meta):
    if all(grid):
        kernel.warmup(*arguments, grid=grid, **meta)

tb.launch = specialise
backend = tb.TritonBackend(torch.device("cpu"), capability=(9, 0), processors=132)
q_heads, kv_heads, head_dim, block, dtype = 12, 4, 64, 16, torch.bfloat16
sinks = torch.zeros(q_heads, dtype=dtype)
shape = dict(q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, block_size=block)
backend.warm_up(**shape, windows=(None, 100), sinks=sinks)
warm = list(compiled)
print("warm-up compiled", sorted(name for name, _ in warm))
assert len(warm) == len(set(warm))

rng = random.Random(0)
blocks = 4096
keys, values = (torch.zeros(kv_heads, blocks * block, head_dim, dtype=dtype) for _ in range(2))
for turn in range(60):
    batch = rng.choice([1, 1, 2, 3, 16, 17, 40])
    common = [rng.randrange(blocks) for _ in range(rng.choice([0, 1, 8, 40]))]
    tables, queries, contexts = [], [], []
    for _ in range(batch):
        own = rng.choice([1, 16, 17, 100])
        tables.append(common + [rng.randrange(blocks) for _ in range(-(-own // block))])
        contexts.append(len(common) * block + own)
        queries.append(rng.choice([1, 1, 1, own]))
    plan = backend.plan(page_tables=tables, query_lens=queries, context_lens=contexts, block_size=block)
    rows = plan.rows
    fused = torch.zeros(rows, q_heads + 2 * kv_heads, head_dim, dtype=dtype)
    query = rng.choice([fused[:, :q_heads], torch.zeros(rows, q_heads, head_dim, dtype=dtype),
                        torch.zeros(q_heads, rows, head_dim, dtype=dtype).transpose(0, 1)])
    for window in (None, 100):
        backend.attend(query, keys, values, plan, scale=rng.random(), sliding_window=window, sinks=sinks)
    new = fused[:, q_heads:]
    backend.write(new[:, :kv_heads], new[:, kv_heads:], keys, values, torch.zeros(rows, dtype=torch.int64))
    copies = [(2 * i, 2 * i + 1, rng.randint(1, block)) for i in range(rng.choice([1, 2, 16]))]
    backend.copy_blocks([keys] * rng.choice([1, 16]), [values], copies, block)
    assert len(compiled) == len(warm), compiled[len(warm):]
print("60 batches compiled nothing")
'''


def test_no_batch_compiles_what_warm_up_has_not(tmp_path: Path) -> None:
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "60 batches compiled nothing" in done.stdout
