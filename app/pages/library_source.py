"""What a conversation reads from: all documents, one collection, or one document whole. One dropdown's value
says which, and the server checks each turn whether it may."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from app.pages.words import Words
from app.store import Conversation

if TYPE_CHECKING:
    from app.collections import CollectionView
    from app.knowledge import DocumentView

SEARCH_ALL = ""
_COLLECTION = "collection:"


def choices_of(
    documents: Iterable[DocumentView], collections: Iterable[CollectionView], w: Words
) -> list[tuple[str, str]]:
    """The picker's choices: everything first, then collections, then single documents."""
    listed = [(w("chat.only_collection", name=view.name), _COLLECTION + view.id) for view in collections]
    listed += [(w("chat.only", title=view.title), view.id) for view in documents]
    return [(w("chat.search_all"), SEARCH_ALL), *listed]


def chosen(value: str | None) -> tuple[str | None, str | None]:
    """The document and the collection that a picker's value means; (None, None) is everything."""
    if not value:
        return None, None
    if value.startswith(_COLLECTION):
        return None, value.removeprefix(_COLLECTION)
    return value, None


def value_of(talk: Conversation) -> str:
    """The picker's value for a stored conversation."""
    if talk.document_id is not None:
        return talk.document_id
    return _COLLECTION + talk.collection_id if talk.collection_id is not None else SEARCH_ALL
