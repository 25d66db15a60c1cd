"""The knowledge base's tables. Integer keys inside, text ids outside.

A document's row holds its present, ready version (0: none yet); the `jobs` row holds what is being made of
a newer upload, or why it failed. Both change in one transaction, so there is never half a version.
"""

from __future__ import annotations

from rag.database import Migration

_SCHEMA = """
CREATE TABLE rag_meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE collections (
  key INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, name TEXT NOT NULL, owner TEXT NOT NULL,
  created REAL NOT NULL
);
CREATE TABLE documents (
  key INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE,
  collection INTEGER NOT NULL REFERENCES collections (key),
  name TEXT NOT NULL, version INTEGER NOT NULL DEFAULT 0, content_hash TEXT, size INTEGER NOT NULL DEFAULT 0,
  title TEXT NOT NULL DEFAULT '', format TEXT NOT NULL DEFAULT '', encoding TEXT NOT NULL DEFAULT '',
  confidence REAL NOT NULL DEFAULT 0, characters INTEGER NOT NULL DEFAULT 0, pages INTEGER NOT NULL DEFAULT 0,
  passages INTEGER NOT NULL DEFAULT 0, created_by TEXT NOT NULL, created REAL NOT NULL, updated REAL NOT NULL
);
CREATE INDEX documents_collection ON documents (collection, key);
CREATE INDEX documents_content ON documents (content_hash);
CREATE TABLE jobs (
  document INTEGER PRIMARY KEY REFERENCES documents (key) ON DELETE CASCADE,
  content_hash TEXT NOT NULL, name TEXT NOT NULL, size INTEGER NOT NULL,
  status TEXT NOT NULL CHECK (status IN ('queued', 'parsing', 'embedding', 'failed')),
  reason TEXT, message TEXT, progress REAL NOT NULL DEFAULT 0, attempts INTEGER NOT NULL DEFAULT 0,
  queued REAL NOT NULL
);
CREATE INDEX jobs_status ON jobs (status, queued);
CREATE INDEX jobs_content ON jobs (content_hash);
CREATE TABLE texts (
  document INTEGER PRIMARY KEY REFERENCES documents (key) ON DELETE CASCADE, text TEXT NOT NULL
);
CREATE TABLE sections (
  document INTEGER NOT NULL REFERENCES documents (key) ON DELETE CASCADE, ordinal INTEGER NOT NULL,
  start INTEGER NOT NULL, stop INTEGER NOT NULL, title TEXT NOT NULL, level INTEGER NOT NULL, page INTEGER,
  PRIMARY KEY (document, ordinal)
) WITHOUT ROWID;
CREATE TABLE passages (
  id INTEGER PRIMARY KEY AUTOINCREMENT,
  document INTEGER NOT NULL REFERENCES documents (key) ON DELETE CASCADE, collection INTEGER NOT NULL,
  section INTEGER NOT NULL, start INTEGER NOT NULL, stop INTEGER NOT NULL, page INTEGER,
  tokens INTEGER NOT NULL
);
CREATE INDEX passages_document ON passages (document);
CREATE INDEX passages_collection ON passages (collection);
CREATE TABLE embeddings (
  passage INTEGER PRIMARY KEY REFERENCES passages (id) ON DELETE CASCADE, vector BLOB NOT NULL
);
CREATE TABLE lexical_totals (
  collection INTEGER PRIMARY KEY, passages INTEGER NOT NULL, terms INTEGER NOT NULL
);
"""

_VERSIONS = """
CREATE TABLE versions (
  document INTEGER NOT NULL REFERENCES documents (key) ON DELETE CASCADE, version INTEGER NOT NULL,
  name TEXT NOT NULL, size INTEGER NOT NULL, characters INTEGER NOT NULL, passages INTEGER NOT NULL,
  ready REAL NOT NULL, PRIMARY KEY (document, version)
) WITHOUT ROWID;
INSERT INTO versions SELECT key, version, name, size, characters, passages, updated FROM documents
  WHERE version > 0;
"""

_TERMS = """
CREATE TABLE passage_terms (
  passage INTEGER PRIMARY KEY REFERENCES passages (id) ON DELETE CASCADE, terms BLOB NOT NULL
);
DROP TABLE lexical_totals;
"""

#: A version, once released, is never edited.
MIGRATIONS: tuple[Migration, ...] = (
    Migration("rag", 1, _SCHEMA),
    Migration("rag", 2, _VERSIONS),
    Migration("rag", 3, _TERMS),
)
