from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rag.database import Database
from rag.datadir import DATABASE, DataDir, read_holder
from rag.errors import DataDirLocked, DataDirUnwritable


def test_only_one_owner_and_the_message_names_it(tmp_path: Path) -> None:
    with DataDir(tmp_path / "data") as owner:
        owner.announce("http://127.0.0.1:7860")
        with pytest.raises(DataDirLocked, match=str(os.getpid())) as caught:
            DataDir(tmp_path / "data")
        assert caught.value.holder["url"] == "http://127.0.0.1:7860"
        assert read_holder(tmp_path / "data")["pid"] == os.getpid()
    with DataDir(tmp_path / "data"):
        pass
    assert read_holder(tmp_path / "data") == {}


def test_the_lock_dies_with_its_owner(tmp_path: Path) -> None:
    code = (
        f"from rag.datadir import DataDir; import os; d = DataDir({str(tmp_path)!r}); os.kill(os.getpid(), 9)"
    )
    root = Path(__file__).parents[2]
    ended = subprocess.run([sys.executable, "-c", code], cwd=root, check=False)
    assert ended.returncode == -9
    DataDir(tmp_path).close()


def test_a_folder_that_cannot_be_made_is_one_clear_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataDirUnwritable, match=r"can't be written .*choose another"):
        DataDir(tmp_path / "file" / "data")


def test_files_lie_under_their_content_hash_and_half_written_ones_vanish(tmp_path: Path) -> None:
    with DataDir(tmp_path) as data_dir:
        first = data_dir.store(b"content")
        assert data_dir.store(b"content") == first
        assert data_dir.file(first).read_bytes() == b"content"
        assert list(data_dir.stored()) == [first]
        (data_dir.tmp / "leftover").write_bytes(b"half")
    with DataDir(tmp_path) as data_dir:
        assert list(data_dir.tmp.iterdir()) == []
        data_dir.remove(first)
        data_dir.remove(first)
        assert list(data_dir.stored()) == []


@pytest.mark.parametrize("name", ["../../etc/passwd", "", "a" * 63, "A" * 64, "a" * 64 + "\n"])
def test_no_name_becomes_a_path(tmp_path: Path, name: str) -> None:
    with DataDir(tmp_path) as data_dir, pytest.raises(ValueError, match="not a content hash"):
        data_dir.file(name)


def modes(folder: Path) -> dict[str, int]:
    """The modes of a folder and of all in it."""
    return {str(p.relative_to(folder)): p.stat().st_mode & 0o777 for p in (folder, *folder.rglob("*"))}


@pytest.mark.skipif(os.name != "posix", reason="this system's files have no modes")
def test_what_was_readable_by_others_is_closed_to_them_at_the_next_start(tmp_path: Path) -> None:
    previous = os.umask(0o022)
    try:
        path = tmp_path / "data"
        path.mkdir()
        (path / "files").mkdir()
        for name in (DATABASE, "cookie.key", "theirs.txt"):
            (path / name).touch()
        with DataDir(path) as owner, Database(owner.database) as database:
            database.write_sync(lambda c: c.execute("CREATE TABLE t (x)"))
            owner.store(b"text")
            found = modes(path)
    finally:
        os.umask(previous)
    assert found.pop("theirs.txt") == 0o644, "what is none of ours stays as it is"
    assert {DATABASE, f"{DATABASE}-wal", "cookie.key", "lock", "files", "tmp", "."} <= found.keys()
    assert {name: mode for name, mode in found.items() if mode & 0o077} == {}


@pytest.mark.skipif(os.name != "posix", reason="this system's files have no modes")
def test_a_folder_that_stays_readable_is_told_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "data"
    path.mkdir()
    path.chmod(0o1777)  # as the system's folder for temporary files: everybody works in it
    with DataDir(path):
        pass
    assert path.stat().st_mode & 0o1777 == 0o1777
    assert f"others on this machine may read {path}," in caplog.text
