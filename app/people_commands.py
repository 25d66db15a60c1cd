"""What `coread keys` and `coread accounts` do, in this process or through a server's door. Results have
documented keys. The machine's owner may do all of this for everybody."""

from __future__ import annotations

from typing import Any

from app.accounts import Account, Accounts
from app.errors import NotFoundHere, ValueRefused
from app.keys import ApiKey, ApiKeys


def _key(key: ApiKey) -> dict[str, Any]:
    return {"id": key.id, "owner": key.owner, "name": key.name, "created": key.created, "used": key.used}


def _account(account: Account) -> dict[str, Any]:
    return {
        "id": account.id,
        "name": account.name,
        "role": account.role,
        "created": account.created,
        "disabled": account.disabled,
    }


class PeopleCommands:
    """One method a command; `run` finds it by name."""

    def __init__(self, accounts: Accounts, keys: ApiKeys) -> None:
        self._accounts, self._keys = accounts, keys

    async def run(self, command: str, body: dict[str, Any]) -> dict[str, Any]:
        """Raises the product's own errors, `NotFoundHere` for an unknown command."""
        match command:
            case "keys/add":
                return await self.add_key(_text(body, "name"), _text(body, "account") or None)
            case "keys/list":
                return {"keys": [_key(key) for key in self._keys.live()]}
            case "keys/revoke":
                await self._keys.revoke(_text(body, "id"))
                return {"revoked": _text(body, "id")}
            case "accounts/list":
                return {"accounts": [_account(account) for account in self._accounts.accounts()]}
            case "accounts/add":
                role = "administrator" if body.get("administrator") is True else "reader"
                made = await self._accounts.create(_text(body, "name"), _text(body, "password"), role)  # type: ignore[arg-type]
                return _account(made)
            case "accounts/password":
                account = self._named(_text(body, "name"))
                await self._accounts.set_password(account.id, _text(body, "password"))
                return _account(account)
        raise NotFoundHere(f"There is no command {command!r}.")

    async def add_key(self, name: str, account: str | None = None) -> dict[str, Any]:
        """A key of an account, or without one a principal of its own.

        Keys: `id`, `owner`, `name`, `created`, `used` and, this once, `key`.
        """
        named = self._named(account) if account else None
        if named is not None and named.disabled is not None:
            raise ValueRefused(f"The account {named.name!r} is locked; it has no keys until it is unlocked.")
        made, secret = await self._keys.create(name, named.id if named is not None else None)
        return _key(made) | {"key": secret}

    def _named(self, name: str) -> Account:
        found = [a for a in self._accounts.accounts() if a.name.casefold() == name.strip().casefold()]
        if not found:
            raise NotFoundHere(f"There is no account {name[:60]!r}.")
        return found[0]


def _text(body: dict[str, Any], name: str) -> str:
    value = body.get(name) or ""
    if not isinstance(value, str) or len(value) > 1_000:
        raise ValueRefused(f"{name} must be a text of at most 1,000 characters.")
    return value
