"""Attention on the matrix unit: against float32, at every edge of its tiles; and what happens without it."""

from __future__ import annotations

import atexit
import logging
import os
import platform
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import amx, amx_build
from kernels.amx import AmxAttention
from kernels.torch_cpu import TorchBackend

needs_unit = pytest.mark.skipif(amx.load() is None, reason="no matrix unit or no C++ compiler here")


def _unit() -> AmxAttention:
    found = amx.load()
    assert found is not None
    return found


def _right(query: Tensor, key: Tensor, value: Tensor, scale: float, group: int) -> tuple[Tensor, Tensor]:
    scores = torch.matmul(query.double(), key.double().mT) * scale
    if group:
        last = torch.arange(query.shape[1]) // group
        scores.masked_fill_(torch.arange(key.shape[1])[None] > last[:, None], float("-inf"))
    return scores.logsumexp(-1), torch.matmul(scores.softmax(-1), value.double())


def _poisoned(heads: int, tokens: int, dim: int, generator: torch.Generator) -> Tensor:
    """`[heads, tokens, dim]` within a larger pool that is NaN all around."""
    pool = torch.full((heads, tokens + 70, dim), float("nan"), dtype=torch.bfloat16)
    inside = pool[:, 35 : 35 + tokens]
    inside.copy_(torch.randn(inside.shape, generator=generator))
    return inside


@needs_unit
@given(
    heads=st.integers(1, 3),
    rows=st.sampled_from([1, 3, 15, 16, 17, 31, 33, 48, 130, 300]),
    tokens=st.sampled_from([1, 2, 15, 16, 17, 31, 32, 33, 47, 255, 256, 257, 273, 530]),
    dim=st.sampled_from([32, 64, 96, 128, 256]),
    size=st.sampled_from([0.1, 1.0, 8.0]),
    threads=st.sampled_from([1, 2]),
    seed=st.integers(0, 1 << 20),
)
@settings(max_examples=120, deadline=None)
def test_rows_over_all_keys(
    heads: int, rows: int, tokens: int, dim: int, size: float, threads: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    query = (torch.randn((heads, rows, dim), generator=generator) * size).bfloat16()
    key, value = (_poisoned(heads, tokens, dim, generator) for _ in range(2))
    _compare(query, key, value, 0, threads)


@needs_unit
@given(
    count=st.sampled_from([1, 2, 5, 16, 17, 40, 86, 257, 300]),
    group=st.integers(1, 5),
    dim=st.sampled_from([32, 64, 96, 128, 256]),
    threads=st.sampled_from([1, 2]),
    seed=st.integers(0, 1 << 20),
)
@settings(max_examples=80, deadline=None)
def test_rows_over_the_keys_up_to_their_own(
    count: int, group: int, dim: int, threads: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn((2, count * group, dim), generator=generator).bfloat16()
    key, value = (_poisoned(2, count, dim, generator) for _ in range(2))
    _compare(query, key, value, group, threads)


def _compare(query: Tensor, key: Tensor, value: Tensor, group: int, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert _unit().serves(query, key, value)
        lse, out = _unit().attend(query, key, value, 0.125, group)
    finally:
        torch.set_num_threads(before)
    right_lse, right_out = _right(query, key, value, 0.125, group)
    # The sum is that of the rounded weights (2^x by steps of 1/128, then to bfloat16), so that passes that
    # are merged by it weigh like one pass.
    torch.testing.assert_close(lse.double(), right_lse, atol=7e-3, rtol=2e-5)
    # Of many rows no more than a little: a key that is left out would show.
    if lse.numel() >= 32:
        assert float((lse.double() - right_lse).mean().abs()) < 1.5e-3
    # Weights are rounded to 0.66 % at most, of values around 3.
    torch.testing.assert_close(out.double(), right_out, atol=1.2e-2, rtol=1e-2)


@needs_unit
def test_a_nan_among_the_keys_is_not_hidden() -> None:
    """A fault in a forward is noticed by its NaN: the running maximum must not swallow it."""
    key = torch.randn((1, 300, 64)).bfloat16()
    key[0, 123] = float("nan")
    query = torch.randn((1, 20, 64)).bfloat16()
    lse, out = _unit().attend(query, key, torch.ones_like(key), 0.125)
    assert lse.isnan().all()
    assert out.isnan().all()
    # Where each row sees the keys up to its own, only those that see it.
    query = torch.randn((1, 300, 64)).bfloat16()
    lse, out = _unit().attend(query, key, torch.ones_like(key), 0.125, 1)
    assert lse[0, 123:].isnan().all()
    assert out[0, 123:].isnan().all()
    assert lse[0, :123].isfinite().all()
    assert out[0, :123].isfinite().all()


@needs_unit
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_a_broken_query_or_value_is_not_hidden_and_stays_its_own(wrong: float) -> None:
    query, key, value = (torch.randn((1, count, 64)).bfloat16() for count in (40, 300, 300))
    query[0, 7, 5] = wrong
    _, out = _unit().attend(query, key, value, 0.125)
    assert not out[0, 7].isfinite().any()
    assert out[0, [*range(7), *range(8, 40)]].isfinite().all()
    value[0, 250, 9] = wrong
    _, out = _unit().attend(query, key, value, 0.125)
    assert not out[0, :, 9].isfinite().any()


@needs_unit
@given(
    group=st.integers(0, 2),
    row=st.integers(0, 39),
    size=st.sampled_from([0.2, 1.0, 6.0]),
    seed=st.integers(0, 1 << 20),
)
@settings(max_examples=40, deadline=None)
def test_what_other_rows_ask_moves_no_bit_of_a_row(group: int, row: int, size: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (
        torch.randn((1, count, 64), generator=generator).bfloat16() for count in (40, 300, 300)
    )
    lse, out = _unit().attend(query, key, value, 0.125, group)
    others = (torch.randn(query.shape, generator=generator) * size).bfloat16()
    others[0, row] = query[0, row]
    other_lse, other_out = _unit().attend(others, key, value, 0.125, group)
    assert torch.equal(lse[0, row], other_lse[0, row])
    assert torch.equal(out[0, row], other_out[0, row])


@needs_unit
@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.float(),
        lambda x: x[..., :48],
        lambda x: x.transpose(1, 2),
        lambda x: torch.zeros((1, 64, 512), dtype=torch.bfloat16),
    ],
    ids=["float32", "gaps", "strides", "too wide"],
)
def test_what_it_does_not_read_is_left_to_torch(change: object) -> None:
    x = torch.zeros((1, 64, 64), dtype=torch.bfloat16)
    assert _unit().serves(x, x, x)
    assert not _unit().serves(x, change(x), x)  # type: ignore[operator]


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(amx_build, "_begun", None)
    monkeypatch.setattr(amx_build, "_ending", threading.Event())
    monkeypatch.setattr(atexit, "register", lambda *_: None)
    amx.library.cache_clear()
    yield
    amx.library.cache_clear()


@pytest.mark.parametrize(
    ("broken", "said"),
    [("flags", "the processor lacks amx_bf16"), ("compiler", "no C++ compiler"), ("source", "failed:")],
)
def test_without_it_the_backend_stays_with_torch_and_says_why(
    broken: str,
    said: str,
    fresh: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    flags = amx_build.CPU_FLAGS - ({"amx_bf16"} if broken == "flags" else set())
    monkeypatch.setattr(amx_build, "cpu_flags", lambda: flags)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho no such thing >&2; exit 1\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(tmp_path / "none") if broken == "compiler" else str(compiler))
    monkeypatch.setattr(amx_build, "_folder", lambda: tmp_path)
    with caplog.at_level(logging.INFO, logger="kernels.amx"):
        backend = TorchBackend(compiled=False)
    assert backend._unit is None
    assert said in caplog.text
    assert not list(tmp_path.glob("*.so"))


def test_without_a_home_or_room_there_is_still_a_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It escaped as an error of pathlib's, and nothing was loaded."""

    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(amx_build, "FOLDER", tmp_path / "package")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", nobody)
    (tmp_path / "package").write_text("no folder")
    own = amx_build._folder()
    assert own.stat().st_mode & 0o777 == 0o700
    assert not list(own.iterdir())
    monkeypatch.setattr(amx_build, "_run", lambda command: "")  # "compiled", and nothing is there
    for name in (*amx_build.SOURCES, *amx_build.HEADERS):
        (tmp_path / name).write_text("")
    monkeypatch.setattr(amx_build, "FOLDER", tmp_path)
    with pytest.raises(amx_build.AmxUnavailable, match="no place for the compiled library"):
        amx_build._compile("c++")


def test_the_folder_of_the_library_is_nobody_elses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A library is code: one that others could have put there is not loaded."""
    monkeypatch.setattr(amx_build, "FOLDER", tmp_path / "package")
    (tmp_path / "package").mkdir()
    shared = tmp_path / "package" / "__pycache__"
    shared.mkdir()
    shared.chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert amx_build._folder() == tmp_path / "cache" / "coread"
    shared.chmod(0o755)
    assert amx_build._folder() == shared


def _slow_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where it says how often it was called; it goes on when `go` is there."""
    compiler = folder / "compiler"
    compiler.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && exit 0\necho x >> {folder}/calls\n'
        f"while [ ! -e {folder}/go ]; do sleep 0.05; done\n"
        'while [ $# -gt 1 ]; do shift; done\n: > "$1"\n'
    )
    compiler.chmod(0o755)
    (folder / "made").mkdir(mode=0o700)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(amx_build, "cpu_flags", lambda: amx_build.CPU_FLAGS)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(amx_build, "_folder", lambda: folder / "made")
    return folder / "calls"


def test_it_is_compiled_once_beside_what_else_loads(
    fresh: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls = _slow_compiler(tmp_path, monkeypatch)
    begun = amx_build.begin()
    assert amx_build.begin() is begun
    assert not begun.done(), "nothing has waited"
    (tmp_path / "go").touch()
    built = [amx_build.built() for _ in range(2)]
    assert built[0] == built[1]
    assert built[0].parent == tmp_path / "made"
    assert calls.read_text() == "x\n"
    assert [path.name for path in (tmp_path / "made").iterdir()] == [built[0].name]


def _compiler_that_starts_another(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As g++ does: what compiles is its child and holds the pipes. Where the child's process id will be."""
    calls = _slow_compiler(folder, monkeypatch)
    (folder / "compiler").write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && exit 0\n'
        f"sh -c 'echo $$ > {folder}/child.new; mv {folder}/child.new {folder}/child; exec sleep 600'\n"
    )
    return calls.with_name("child")


def _gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_process_that_ends_takes_its_compiler_along(
    fresh: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    child = _compiler_that_starts_another(tmp_path, monkeypatch)
    before = set(threading.enumerate())
    begun = amx_build.begin()
    thread = next(t for t in threading.enumerate() if t not in before)
    while not child.exists():
        assert thread.is_alive(), begun.exception()
        time.sleep(0.05)
    amx_build._end(thread)
    assert not thread.is_alive()
    with pytest.raises(amx_build.AmxUnavailable, match="failed"):
        amx_build.built()
    assert _gone(int(child.read_text()))
    assert not list((tmp_path / "made").iterdir())
    with pytest.raises(amx_build.AmxUnavailable, match="failed"):  # what would only begin now
        amx_build._run([str(tmp_path / "compiler"), "x"])


def test_a_compiler_that_hangs_is_given_up(
    fresh: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    child = _compiler_that_starts_another(tmp_path, monkeypatch)
    monkeypatch.setattr(amx_build, "_COMPILE_S", 1)
    with pytest.raises(amx_build.AmxUnavailable, match="did not end"):
        amx_build.built()
    assert not child.exists() or _gone(int(child.read_text()))


def test_a_thread_that_cannot_be_started_is_no_lasting_fault(
    fresh: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _slow_compiler(tmp_path, monkeypatch)
    (tmp_path / "go").touch()

    def none(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", none)
        with pytest.raises(RuntimeError, match="new thread"):
            amx_build.built()
    assert amx_build.built().exists()


def test_what_a_killed_process_left_is_removed(
    fresh: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _slow_compiler(tmp_path, monkeypatch)
    (tmp_path / "go").touch()
    old, new = tmp_path / "made" / "amx-old", tmp_path / "made" / "amx-new"
    for folder in (old, new):
        folder.mkdir()
        (folder / "built.so").touch()
    os.utime(old, (0, 0))
    built = amx_build.built()
    assert set((tmp_path / "made").iterdir()) == {new, built}
