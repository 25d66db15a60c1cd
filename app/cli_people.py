"""`coread keys`, `coread accounts`, `coread backup` and `coread restore`: none of them loads a model."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from app.render import counted
from app.settings import load_settings

Guard = Callable[[Callable[[], Any]], Any]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object with documented keys.")]
Password = Annotated[str, typer.Option(prompt=True, confirmation_prompt=True, hide_input=True)]
DataDirOption = Annotated[Path | None, typer.Option("--data-dir", help="Where everything is kept.")]


def run_people(data_dir: Path | None, command: str, body: dict[str, Any]) -> dict[str, Any]:
    """Do a command on the data directory, or through the door of the server that holds it.

    Raises the product's own errors, `ServerUnreachable` and `ServerRefused` among them.
    """
    from app.accounts import Accounts
    from app.client import Door
    from app.data_dir import resolve_data_dir
    from app.keys import ApiKeys
    from app.people_commands import PeopleCommands
    from app.people_schema import MIGRATIONS as PEOPLE
    from app.store import MIGRATIONS
    from rag.database import Database
    from rag.datadir import DataDir
    from rag.errors import DataDirLocked

    path = resolve_data_dir(load_settings(data_dir=data_dir).data_dir)
    try:
        owned = DataDir(path)
    except DataDirLocked as locked:
        url = locked.holder.get("url")
        if not isinstance(url, str):
            raise
        return Door(path, url).post(command, body)

    async def work(database: Database) -> dict[str, Any]:
        accounts = Accounts(database, "unused")
        keys = ApiKeys(database, accounts.role_of)
        try:
            await accounts.open()
            await keys.open()
            return await PeopleCommands(accounts, keys).run(command, body)
        finally:
            accounts.close()

    with owned, Database(owned.database, [*MIGRATIONS, *PEOPLE]) as database:
        return asyncio.run(work(database))


def _print(value: dict[str, Any], lines: list[str], as_json: bool) -> None:
    typer.echo(json.dumps(value, ensure_ascii=False, indent=2) if as_json else "\n".join(lines))


def _day(at: float | None) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(at)) if at else "never"


def register(app: typer.Typer, guarded: Guard) -> None:
    """Add the commands to the `coread` command; `guarded` turns errors into one sentence."""
    keys = typer.Typer(help="Keys for programs that ask over HTTP.", no_args_is_help=True)
    accounts = typer.Typer(help="People who may sign in.", no_args_is_help=True)
    app.add_typer(keys, name="keys")
    app.add_typer(accounts, name="accounts")
    _keys(keys, guarded)
    _accounts(accounts, guarded)
    _backups(app, guarded)


def _keys(keys: typer.Typer, guarded: Guard) -> None:
    @keys.command("add")
    def add(
        name: Annotated[str, typer.Argument(help="What the key is for.")],
        account: Annotated[str | None, typer.Option(help="Act as this account.")] = None,
        as_json: Json = False,
        data_dir: DataDirOption = None,
    ) -> None:
        """Make a key and show it, this once; JSON keys: id, owner, name, created, used, key."""
        made = guarded(lambda: run_people(data_dir, "keys/add", {"name": name, "account": account}))
        _print(made, [made["key"], f"  id {made['id']}; it cannot be shown again"], as_json)

    @keys.command("list")
    def show(as_json: Json = False, data_dir: DataDirOption = None) -> None:
        """List the live keys; JSON keys: keys."""
        found = guarded(lambda: run_people(data_dir, "keys/list", {}))
        lines = [
            f"{key['id']}  {key['name']}  (made {_day(key['created'])}, used {_day(key['used'])})"
            for key in found["keys"]
        ]
        _print(found, lines or ["There is no key."], as_json)

    @keys.command("revoke")
    def revoke(
        id: Annotated[str, typer.Argument(help="The key's id, as `coread keys list` shows it.")],
        as_json: Json = False,
        data_dir: DataDirOption = None,
    ) -> None:
        """End a key at once; JSON keys: revoked."""
        _print(guarded(lambda: run_people(data_dir, "keys/revoke", {"id": id})), ["Revoked."], as_json)


def _accounts(accounts: typer.Typer, guarded: Guard) -> None:
    @accounts.command("list")
    def show(as_json: Json = False, data_dir: DataDirOption = None) -> None:
        """List the accounts; JSON keys: accounts."""
        found = guarded(lambda: run_people(data_dir, "accounts/list", {}))
        lines = [f"{a['name']}  {a['role']}{'  locked' if a['disabled'] else ''}" for a in found["accounts"]]
        _print(found, lines or ["There is no account."], as_json)

    @accounts.command("add")
    def add(
        name: Annotated[str, typer.Argument()],
        password: Password,
        administrator: Annotated[bool, typer.Option("--administrator")] = False,
        as_json: Json = False,
        data_dir: DataDirOption = None,
    ) -> None:
        """Add a person; JSON keys: id, name, role, created, disabled."""
        body = {"name": name, "password": password, "administrator": administrator}
        made = guarded(lambda: run_people(data_dir, "accounts/add", body))
        _print(made, [f"{made['name']} may sign in now."], as_json)

    @accounts.command("password")
    def change(
        name: Annotated[str, typer.Argument()],
        password: Password,
        as_json: Json = False,
        data_dir: DataDirOption = None,
    ) -> None:
        """Give a person another password; their sessions end. JSON keys as for `add`."""
        body = {"name": name, "password": password}
        made = guarded(lambda: run_people(data_dir, "accounts/password", body))
        _print(made, [f"{made['name']} has a new password."], as_json)


def _backups(app: typer.Typer, guarded: Guard) -> None:
    @app.command()
    def backup(
        target: Annotated[Path, typer.Argument(help="A folder to make; it must be absent or empty.")],
        as_json: Json = False,
        data_dir: DataDirOption = None,
    ) -> None:
        """Back the data directory up, also while a server runs; JSON keys: path, files, bytes, missing."""

        def work() -> dict[str, Any]:
            from app.backup import make_backup
            from app.data_dir import resolve_data_dir

            return make_backup(resolve_data_dir(load_settings(data_dir=data_dir).data_dir), target).json()

        made = guarded(work)
        _print(
            made, [f"{counted(made['files'], 'file')}, {made['bytes']:,} bytes in {made['path']}"], as_json
        )

    @app.command()
    def restore(
        source: Annotated[Path, typer.Argument(help="A folder that `coread backup` made.")],
        as_json: Json = False,
        data_dir: DataDirOption = None,
    ) -> None:
        """Check a backup and lay it in an empty data directory; JSON keys as for `backup`."""

        def work() -> dict[str, Any]:
            from app.backup import restore_backup
            from app.data_dir import resolve_data_dir

            return restore_backup(source, resolve_data_dir(load_settings(data_dir=data_dir).data_dir)).json()

        made = guarded(work)
        _print(made, [f"{counted(made['files'], 'file is', 'files are')} back in {made['path']}"], as_json)
