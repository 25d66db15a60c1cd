"""Tables of people and programs: accounts, sessions, API keys. What proves an identity is kept hashed."""

from __future__ import annotations

from rag.database import Migration

_SCHEMA = """
CREATE TABLE app_accounts (
  id TEXT PRIMARY KEY, name TEXT NOT NULL UNIQUE COLLATE NOCASE,
  role TEXT NOT NULL CHECK (role IN ('administrator', 'reader')),
  password TEXT NOT NULL, created REAL NOT NULL, disabled REAL
);
CREATE TABLE app_sessions (
  id TEXT PRIMARY KEY, account TEXT NOT NULL REFERENCES app_accounts (id) ON DELETE CASCADE,
  token_hash BLOB NOT NULL UNIQUE, created REAL NOT NULL, seen REAL NOT NULL, label TEXT NOT NULL
);
CREATE INDEX app_sessions_account ON app_sessions (account);
CREATE TABLE app_keys (
  id TEXT PRIMARY KEY, owner TEXT NOT NULL, name TEXT NOT NULL, secret_hash BLOB NOT NULL UNIQUE,
  created REAL NOT NULL, used REAL, revoked REAL
);
CREATE INDEX app_keys_owner ON app_keys (owner);
"""

#: A version, once released, is never edited.
MIGRATIONS: tuple[Migration, ...] = (Migration("people", 1, _SCHEMA),)
