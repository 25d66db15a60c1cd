"""After warm-up no batch makes Triton compile again, and no step of the engine, its first one included.

Triton's own argument specialisation runs here against a stand-in for the GPU's driver; only the compiler
behind it is replaced by a counter. It needs a process of its own: in this one the interpreter is on.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

COUNTER = '''
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
'''

KERNELS = """
backend = tb.TritonBackend(torch.device("cpu"), capability=(9, 0), processors=132)
q_heads, kv_heads, head_dim, block, dtype = 12, 4, 64, 16, torch.bfloat16
sinks = torch.zeros(q_heads, dtype=dtype)
blocks = 4096
keys, values = (torch.zeros(kv_heads, blocks * block, head_dim, dtype=dtype) for _ in range(2))
for table, queries, contexts in backend.warm_up_batches(q_heads // kv_heads, block):
    query = torch.zeros(sum(queries), q_heads, head_dim, dtype=dtype)
    tables = [table] * len(queries)
    plan = backend.plan(page_tables=tables, query_lens=queries, context_lens=contexts, block_size=block)
    for window in (None, 100):
        backend.attend(query, keys, values, plan, scale=1.0, sliding_window=window, sinks=sinks)
row = torch.zeros(1, kv_heads, head_dim, dtype=dtype)
backend.write(row, row, keys, values, torch.zeros(1, dtype=torch.int64))
backend.copy_blocks([keys], [values], [(0, 1, block)], block)
warm = list(compiled)
print("warm-up compiled", sorted(name for name, _ in warm))
assert len(warm) == len(set(warm))

rng = random.Random(0)
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
"""


ENGINE = '''
from engine.loading import use_graphs
from engine.runner import Row, Runner
from engine.sampler import SamplerState
from engine.types import Copy, SamplingParams
from tests.engine.tiny import tiny_model


class Again:
    """A GraphDevice whose replay runs the captured pass again."""
    def host_vector(self, size): return torch.empty(size, dtype=torch.int32)
    def wait_uploaded(self): pass
    def upload(self, host, target): target[: host.numel()].copy_(host)
    def capture(self, run):
        run()
        return run


def row(key, tokens, start, table):
    params = SamplingParams(temperature=rng.choice([0.0, 1.0]), top_p=0.9, seed=key)
    return Row(key, [3] * tokens, start, table, 0, True, SamplerState(params))


rng = random.Random(0)
for family in ("llama", "gpt_oss"):  # the latter has windows and sinks
    for with_graphs in (False, True):
        compiled.clear()
        for kernel in (tb.attention_kernel, tb.merge_kernel, tb.write_kernel, tb.copy_kernel):
            kernel.device_caches.clear()
        model = tiny_model(family, head_dim=64, num_attention_heads=8, num_key_value_heads=2)
        backend = tb.TritonBackend(torch.device("cpu"), capability=(9, 0), processors=132)
        pool = model.new_pool(64, 16)
        pool.storage.zero_()
        runner = Runner(model, pool, backend)
        runner.warm_up()
        if with_graphs:
            use_graphs(runner, Again(), 8)
            assert runner.graphs is not None
        warm = len(compiled)
        names = {name for name, _ in compiled}
        assert names == {"attention_kernel", "merge_kernel", "write_kernel", "copy_kernel"}, names
        document = list(range(10))
        runner.step([row(0, 37, 0, [20, 21, 22])])                      # the first question
        runner.step([row(0, 1, 37, [20, 21, 22])])                      # its first decode
        runner.step([row(1, 160, 0, document), row(0, 1, 38, [20, 21, 22])])
        readers = [[*document, 30 + s] for s in range(9)]
        for count in (1, 2, 3, 8, 9):
            runner.step([row(s, 1, 160 + s, readers[s]) for s in range(count)])
        rows = [row(s, 1 + s % 3, 165, readers[s]) for s in range(5)]
        runner.step(rows, [Copy(30, 50, 7), Copy(31, 51, 16)])
        assert len(compiled) == warm, [name for name, _ in compiled[warm:]]
        print(family, "with graphs" if with_graphs else "without graphs", "warm-up", warm, "then none")
'''


def run(script: str, tmp_path: Path) -> str:
    path = tmp_path / "child.py"
    path.write_text(COUNTER + script)
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_no_batch_compiles_what_warm_up_has_not(tmp_path: Path) -> None:
    assert "60 batches compiled nothing" in run(KERNELS, tmp_path)


def test_the_engines_first_step_compiles_nothing_that_warm_up_could_have(tmp_path: Path) -> None:
    assert run(ENGINE, tmp_path).count("then none") == 4
