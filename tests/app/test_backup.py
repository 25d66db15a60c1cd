"""Backup while people write, restore, upgrade of an older database, and the commands around them."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import sqlite3
import threading
from pathlib import Path

import pytest
from typer.testing import CliRunner

from app.accounts import Accounts
from app.backup import BackupFailed, check_backup, make_backup, restore_backup
from app.cli import app as cli
from app.people_schema import MIGRATIONS as PEOPLE
from app.principal import Principal
from app.runtime import Runtime
from app.settings import load_settings
from app.store import MIGRATIONS, Store
from rag.database import Database
from rag.datadir import DataDir
from rag.errors import DatabaseError, DataDirLocked
from rag.library import Library
from tests.app.conftest import FakeParts
from tests.rag.conftest import HashEmbedder

ANN = Principal("anonymous", "b-ann")
OLD = Path(__file__).parent / "fixtures" / "database_v1.sqlite.gz"


async def served(runtime: Runtime, who: Principal = ANN) -> tuple[str, str]:
    """A document and an answered conversation; their ids."""
    document = await runtime.knowledge.upload(who, "hens.md", b"# Hens\n\nA hen lays an egg.\n")
    async for _ in runtime.knowledge.progress(who, document, 0.05):
        pass
    talk = await runtime.store.create(who)
    async for _ in runtime.chat.ask(who, talk.id, "What does a hen lay?"):
        pass
    return document, talk.id


async def test_a_restored_backup_serves_the_same_people(runtime: Runtime, tmp_path: Path) -> None:
    document, talk = await served(runtime)
    _, secret = await runtime.keys.create("script")
    _, cookie = runtime.signer.issue()
    data_dir = runtime.settings.data_dir
    assert data_dir is not None
    report = await asyncio.to_thread(make_backup, data_dir, tmp_path / "backup")
    assert report.missing == 0
    await runtime.knowledge.delete(ANN, document)  # what comes after the backup is not in it
    await asyncio.to_thread(restore_backup, tmp_path / "backup", tmp_path / "restored")
    again = Runtime(load_settings(data_dir=tmp_path / "restored"), FakeParts())
    again.open()
    again.start()
    await again.wait_seeded()
    try:
        assert document in {d.id for d in await again.knowledge.documents(ANN)}
        readable = await again.store.readable(ANN)
        with await again.knowledge._library.original(document, readable) as file:
            assert b"lays an egg" in file.read()
        hits = await again.knowledge.search(readable, "hen egg", 3)
        assert hits[0].document_id == document
        assert [m.role for m in await again.store.path(ANN, talk)] == ["user", "assistant"]
        assert again.keys.principal(secret) is not None
        assert again.signer.check(cookie) is not None, "people stay who they were"
        assert (await again.knowledge._library.check()).ok
    finally:
        await again.stop()


async def test_a_backup_under_load_is_one_moment(
    runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each transaction writes a pair of rows; a copy that tore one apart would show a lone row, and one
    without a snapshot of its own would begin anew with each of them and never end."""
    monkeypatch.setattr("app.backup._PAGES", 8)
    database = runtime._database
    assert database is not None
    await database.write(lambda c: c.execute("CREATE TABLE pairs (a INTEGER, pad BLOB)").rowcount)
    stop = threading.Event()

    def write() -> None:
        number = 0
        while not stop.wait(0.002):
            number += 1

            def pair(c: sqlite3.Connection, n: int = number) -> None:
                c.execute("INSERT INTO pairs VALUES (?, zeroblob(4000))", (n,))
                c.execute("INSERT INTO pairs VALUES (?, zeroblob(4000))", (-n,))

            database.write_sync(pair)

    data_dir = runtime.settings.data_dir
    assert data_dir is not None
    writer = threading.Thread(target=write)
    writer.start()
    try:
        for number in range(2):
            await asyncio.to_thread(make_backup, data_dir, tmp_path / f"b{number}")
    finally:
        stop.set()
        writer.join()
    for number in range(2):
        with sqlite3.connect(tmp_path / f"b{number}" / "coread.sqlite") as copy:
            assert copy.execute("SELECT COALESCE(SUM(a), 0) FROM pairs").fetchone()[0] == 0
            assert copy.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
        copy.close()


def small_data_dir(path: Path) -> Path:
    library = Library.open(path, HashEmbedder(), migrations=MIGRATIONS)
    collection = library.create_collection("c", "b-ann")
    document = library.add_document(collection.id, "a.md", b"# A\n\nSome text.\n", "b-ann")
    library.when_finished(document).result(30)
    library.close(all=True)
    return path


@pytest.mark.parametrize("damage", ["changed", "missing", "manifest", "outside", "database", "format"])
def test_a_damaged_backup_is_refused_and_nothing_is_laid(tmp_path: Path, damage: str) -> None:
    backup, target = tmp_path / "backup", tmp_path / "target"
    make_backup(small_data_dir(tmp_path / "data"), backup)
    manifest = json.loads((backup / "backup.json").read_text())
    (stored,) = [name for name in manifest["files"] if name.startswith("files/")]
    if damage == "changed":
        (backup / stored).write_bytes(b"other")
    elif damage == "missing":
        (backup / stored).unlink()
    elif damage == "manifest":
        (backup / "backup.json").unlink()
    elif damage == "outside":
        (tmp_path / "secret").write_text("x")
        manifest["files"]["../secret"] = manifest["files"][stored]
        (backup / "backup.json").write_text(json.dumps(manifest))
    elif damage == "format":
        (backup / "backup.json").write_text("[]")
    else:
        (backup / "coread.sqlite").write_bytes(b"SQLite format 3\0" + b"x" * 5000)
    with pytest.raises(BackupFailed):
        restore_backup(backup, target)
    assert not target.exists()


def hostile(backup: Path, names: dict[str, bytes]) -> None:
    """Have a backup's manifest name more files, each as its content says."""
    manifest = json.loads((backup / "backup.json").read_text())
    more = {name: hashlib.sha256(data).hexdigest() for name, data in names.items()}
    manifest["files"] = {**more, **manifest["files"]}
    (backup / "backup.json").write_text(json.dumps(manifest))


def test_a_backup_writes_nothing_outside_the_data_directory(tmp_path: Path) -> None:
    """Behind a link, `..` means one thing where a file is read and another where it is written."""
    backup, home = tmp_path / "backup", tmp_path / "deep"
    make_backup(small_data_dir(tmp_path / "data"), backup)
    (backup / "q" / "d2").mkdir(parents=True)
    (backup / "q" / "d2" / "pad").write_bytes(b"x")
    (backup / "a").symlink_to(backup / "q" / "d2")
    (backup / "evil").write_bytes(b"owned")
    hostile(backup, {"a/pad": b"x", "a/../../evil": b"owned"})
    home.mkdir()
    with pytest.raises(BackupFailed, match="it names 'a/pad'"):
        restore_backup(backup, home / "data")
    assert list(home.iterdir()) == []


@pytest.mark.parametrize(
    "name",
    ["notes.txt", "admin.key", "lock", "/etc/motd", "files/../coread.sqlite", "./coread.sqlite",
     "files/ab/" + "ab" * 31, "files/ab/" + "cd" * 32, "files/AB/" + "AB" * 32, f"files/ab/{'ab' * 32}/x",
     f"files/ab/{'ab' * 32}\n", ""],
)  # fmt: skip
def test_only_what_a_backup_has_is_restored(tmp_path: Path, name: str) -> None:
    backup = tmp_path / "backup"
    make_backup(small_data_dir(tmp_path / "data"), backup)
    hostile(backup, {name: b"x"})
    with pytest.raises(BackupFailed, match="it names"):
        restore_backup(backup, tmp_path / "target")
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("linked", ["backup.json", "coread.sqlite", "file", "folder", "files"])
def test_no_link_in_a_backup_is_followed(tmp_path: Path, linked: str) -> None:
    backup = tmp_path / "backup"
    make_backup(small_data_dir(tmp_path / "data"), backup)
    (stored,) = [path for path in (backup / "files").rglob("*") if path.is_file()]
    path = {"file": stored, "folder": stored.parent}.get(linked, backup / linked)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BackupFailed, match="neither a file nor a folder"):
        restore_backup(backup, tmp_path / "target")
    assert not (tmp_path / "target").exists()


def test_a_file_under_another_ones_name_is_refused(tmp_path: Path) -> None:
    """It would be served as the document of that name."""
    backup, name = tmp_path / "backup", "files/ab/" + "ab" * 32
    make_backup(small_data_dir(tmp_path / "data"), backup)
    (backup / name).parent.mkdir(exist_ok=True)
    (backup / name).write_bytes(b"x")
    hostile(backup, {name: b"x"})
    with pytest.raises(BackupFailed, match="not named by its SHA-256"):
        restore_backup(backup, tmp_path / "target")


def test_a_database_names_no_path_to_back_up(tmp_path: Path) -> None:
    data = small_data_dir(tmp_path / "data")
    (tmp_path / "secret").write_text("x")
    with sqlite3.connect(data / "coread.sqlite") as c:
        c.execute("UPDATE documents SET content_hash = '../../../secret'")
    c.close()
    with pytest.raises(BackupFailed, match="no SHA-256"):
        make_backup(data, tmp_path / "backup")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "secret"]


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    data, backup = small_data_dir(tmp_path / "data"), tmp_path / "backup"
    make_backup(data, backup)
    with pytest.raises(BackupFailed, match="not empty"):
        make_backup(data, backup)
    with pytest.raises(BackupFailed, match="holds a database already"):
        restore_backup(backup, data)
    with pytest.raises(BackupFailed, match="inside the data directory"):
        make_backup(data, data / "backup")
    with pytest.raises(BackupFailed, match="no database"):
        make_backup(tmp_path / "empty", tmp_path / "b2")
    with DataDir(tmp_path / "busy"), pytest.raises(DataDirLocked):
        restore_backup(backup, tmp_path / "busy")


def test_only_the_owner_may_read_a_backup(tmp_path: Path) -> None:
    backup = tmp_path / "backup"
    make_backup(small_data_dir(tmp_path / "data"), backup)
    modes = {path.stat().st_mode & 0o077 for path in [backup, *backup.rglob("*")]}
    assert modes == {0}
    assert not (backup / "admin.key").exists(), "the commands' token is each server's own"


def test_a_failing_copy_leaves_no_half_backup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = small_data_dir(tmp_path / "data")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("app.backup.shutil.copyfile", full)
    with pytest.raises(BackupFailed, match="No space left"):
        make_backup(data, tmp_path / "backup")
    assert not (tmp_path / "backup").exists()


def test_a_file_that_went_meanwhile_is_counted(tmp_path: Path) -> None:
    data = small_data_dir(tmp_path / "data")
    (stored,) = [path for path in (data / "files").rglob("*") if path.is_file()]
    stored.unlink()
    assert make_backup(data, tmp_path / "backup").missing == 1
    assert check_backup(tmp_path / "backup")["missing"] == 1


# Upgrades


async def test_a_database_of_the_first_schema_is_brought_up_to_date(tmp_path: Path) -> None:
    """The file was written by the code before there were accounts, keys and limits."""
    data = tmp_path / "data"
    data.mkdir()
    (data / "coread.sqlite").write_bytes(gzip.decompress(OLD.read_bytes()))
    library = Library.open(data, HashEmbedder(), migrations=[*MIGRATIONS, *PEOPLE])
    try:
        store = Store(library.database)
        readable = await store.readable(ANN)
        (document,) = await asyncio.to_thread(library.documents, readable)
        assert (document.name, document.status) == ("hens.md", "ready")
        assert "lays an egg" in (await asyncio.to_thread(library.document, document.id, readable)).text
        assert (await asyncio.to_thread(library.search, "hen egg", readable))[0].document_id == document.id
        (talk,) = await store.conversations(ANN)
        asked, answered = await store.path(ANN, talk.id)
        assert (asked.text, answered.text, answered.tokens) == ("What does a hen lay?", "An egg.", (1, 2))
        assert answered.references[0].verdict == "verified"
        accounts = Accounts(library.database, "s")
        await accounts.open()
        assert accounts.accounts() == []
        accounts.close()
    finally:
        await asyncio.to_thread(library.close, all=True)


def test_a_newer_database_is_left_alone(tmp_path: Path) -> None:
    with Database(tmp_path / "t.sqlite", PEOPLE) as database:
        database.write_sync(
            lambda c: c.execute("INSERT INTO schema_migrations VALUES ('people', 99, 0)").rowcount
        )
    with pytest.raises(DatabaseError, match="newer program"):
        Database(tmp_path / "t.sqlite", PEOPLE)


# Commands


def test_the_commands_make_people_keys_and_backups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.passwords._N", 2**4)
    data, runner = str(tmp_path / "data"), CliRunner()

    def run(*arguments: str, given: str | None = None, code: int = 0) -> str:
        result = runner.invoke(cli, [*arguments, "--data-dir", data], input=given)
        assert result.exit_code == code, result.output
        return result.output

    run("accounts", "add", "Ann", "--administrator", given="correct horse\ncorrect horse\n")
    assert "Ann  administrator" in run("accounts", "list")
    assert "between 10 and 256" in run("accounts", "add", "Bob", given="short\nshort\n", code=1)
    made = json.loads(run("keys", "add", "script", "--account", "ann", "--json"))
    assert made["owner"].startswith("a-")
    assert "script" in run("keys", "list")
    assert "no account" in run("keys", "add", "x", "--account", "nobody", code=1)
    run("accounts", "password", "Ann", given="battery staple\nbattery staple\n")
    report = json.loads(run("backup", str(tmp_path / "backup"), "--json"))
    assert report["missing"] == 0
    assert "holds a database already" in run("restore", str(tmp_path / "backup"), code=1)
    run("keys", "revoke", made["id"])
    assert "There is no key." in run("keys", "list")
    data = str(tmp_path / "elsewhere")
    run("restore", str(tmp_path / "backup"))
    assert "script" in run("keys", "list"), "the backup is older than the revocation"
