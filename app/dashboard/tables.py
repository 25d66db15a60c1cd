"""What the dashboard shows beside the block map, made from a snapshot: rows, tree, page tables, history.

Names go only to those who may know them: `own` holds the viewer's conversations (and the scripted readers
of a demonstration, which are nobody's), `titles` the documents that the viewer may read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.ledger import MemorySnapshot, Row
    from engine.service import PageTableView
    from engine.tree_picture import TreeNode, TreePicture

#: Rows of other people's conversations; the rest are one row.
MAX_OTHERS = 20
MAX_TABLES = 4
MAX_ENTRIES = 256


def whole_parts(parts: Sequence[Fraction]) -> list[int]:
    """Whole numbers that add up to the sum of `parts`, rounded by largest remainder. The sum must be whole.

    Raises `ValueError` where it is not: then the parts are not those of a whole.
    """
    common = math.lcm(*(part.denominator for part in parts))
    scaled = [part.numerator * (common // part.denominator) for part in parts]
    total, left = divmod(sum(scaled), common)
    if left:
        raise ValueError(f"the parts add up to {total + Fraction(left, common)}, which is not a whole number")
    floors = [part // common for part in scaled]
    order = sorted(range(len(parts)), key=lambda i: (-(scaled[i] % common), i))
    for index in order[: total - sum(floors)]:
        floors[index] += 1
    return floors


def shares(rows: Mapping[str, Row]) -> dict[str, int]:
    """Each conversation's fair share in whole bytes; they add up to the view's physical bytes."""
    names = list(rows)
    return dict(zip(names, whole_parts([rows[name].fair_share for name in names]), strict=True))


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one view, made once for all viewers: by name, largest first, and the sums over all."""

    by_name: dict[str, dict[str, Any]]
    sums: dict[str, int]


_SUMMED = (
    "sequences", "tokens", "blocks", "shared_blocks", "reserved_bytes", "unshared_bytes", "fair_share_bytes",
    "saved_bytes", "count",
)  # fmt: skip


def all_rows(rows: Mapping[str, Row], running: Mapping[str, Row]) -> Rows:
    """Every conversation's row, with names as keys only. `fair_share_bytes` add up to the view's bytes."""
    share = shares(rows)
    order = sorted(rows, key=lambda name: (-rows[name].unshared_bytes, -rows[name].shared_blocks))
    found = {name: _row_json(rows[name], share[name]) | {"running": name in running} for name in order}
    return Rows(found, {key: sum(row[key] for row in found.values()) for key in _SUMMED})


def _row_json(row: Row, share: int) -> dict[str, Any]:
    return {
        "count": 1,
        "sequences": row.sequences,
        "tokens": row.tokens,
        "blocks": row.blocks,
        "shared_blocks": row.shared_blocks,
        "reserved_bytes": row.reserved_bytes,
        "unshared_bytes": row.unshared_bytes,
        "fair_share_bytes": share,
        "saved_bytes": row.unshared_bytes - share,
    }


def table(rows: Rows, own: Mapping[str, str]) -> list[dict[str, Any]]:
    """The rows for one viewer: its own first, then others without names, the last one for the rest.

    Keys: those of `_row_json`, and `kind` ("own", "other", "rest", "system"), `id` and `title` (own only),
    `running`. Figures add up to those of the view.
    """
    from engine.ledger import SYSTEM

    shown = [
        {"kind": "own", "id": id, "title": title, **rows.by_name[id]}
        for id, title in own.items()
        if id in rows.by_name
    ]
    others = (name for name in rows.by_name if name not in own)
    for name in islice(others, MAX_OTHERS):
        shown.append({"kind": "system" if name == SYSTEM else "other", **rows.by_name[name]})
    left = {key: total - sum(row[key] for row in shown) for key, total in rows.sums.items()}
    if left["count"]:
        shown.append({"kind": "rest", "running": False, **left})
    return shown


def history(snapshot: MemorySnapshot) -> list[list[float]]:
    """Savings over time: `[seconds before this snapshot, bytes saved running, bytes saved open]`."""
    return [[round(snapshot.at - s.at, 1), s.running_bytes, s.open_bytes] for s in snapshot.history]


def _kind(node: TreeNode) -> str:
    return "branch" if node.private else "document" if node.documents else "instructions"


def document_label(documents: frozenset[str], titles: Mapping[str, str]) -> tuple[str, int]:
    """The titles of those documents that the viewer may know, and how many others there are."""
    known = sorted(titles[id] for id in documents if id in titles)
    return ", ".join(known), len(documents) - len(known)


def tree_json(
    picture: TreePicture, block_bytes: int, titles: Mapping[str, str], mine: frozenset[int]
) -> dict[str, Any]:
    """The tree for one viewer. A node: `parent`, `kind` ("instructions", "document", "branch"), `label`
    (titles that the viewer may know), `hidden` (how many other documents), `blocks`, `below`, `left_out`,
    `tokens`, `readers`, `open_readers`, `copied`, `tail`, `pinned`, `mine`."""
    nodes = [
        {
            "parent": node.parent,
            "kind": _kind(node),
            **dict(zip(("label", "hidden"), document_label(node.documents, titles), strict=True)),
            "blocks": len(node.blocks),
            "below": node.below,
            "left_out": node.left_out,
            "tokens": node.tokens,
            "readers": node.readers,
            "open_readers": node.open_readers,
            "copied": node.copied,
            "tail": node.open_tail,
            "pinned": node.pinned,
            "mine": not mine.isdisjoint(node.blocks),
        }
        for node in picture.nodes
    ]
    return {
        "nodes": nodes,
        "blocks": picture.blocks,
        "left_out": picture.left_out,
        "block_bytes": block_bytes,
    }


def page_tables_json(views: Sequence[PageTableView]) -> list[dict[str, Any]]:
    """Page tables as lists in logical order, at most `MAX_TABLES` of at most `MAX_ENTRIES` entries."""
    return [
        {
            "running": view.running,
            "tokens": view.tokens,
            "entries": len(view.blocks),
            "blocks": list(view.blocks[:MAX_ENTRIES]),
            "readers": list(view.readers[:MAX_ENTRIES]),
            "filled": list(view.filled[:MAX_ENTRIES]),
            "copied": list(view.copied[:MAX_ENTRIES]),
        }
        for view in views[:MAX_TABLES]
    ]
