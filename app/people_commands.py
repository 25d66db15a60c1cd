"""What `coread keys` does, in this process or through a server's door. Results have documented keys."""

from __future__ import annotations

from typing import Any

from app.keys import ApiKey, ApiKeys


def _key(key: ApiKey) -> dict[str, Any]:
    return {"id": key.id, "owner": key.owner, "name": key.name, "created": key.created, "used": key.used}


class PeopleCommands:
    """The machine's owner may do all of this for everybody."""

    def __init__(self, keys: ApiKeys) -> None:
        self._keys = keys

    async def add_key(self, name: str, account: str | None = None) -> dict[str, Any]:
        """Keys: `id`, `owner`, `name`, `created`, `used` and, this once, `key`."""
        made, secret = await self._keys.create(name)
        return _key(made) | {"key": secret}

    def list_keys(self) -> dict[str, Any]:
        """Keys: `keys`, each with `id`, `owner`, `name`, `created`, `used`."""
        return {"keys": [_key(key) for key in self._keys.live()]}

    async def revoke_key(self, id: str) -> dict[str, Any]:
        """Keys: `revoked`, the key's id."""
        await self._keys.revoke(id)
        return {"revoked": id}
