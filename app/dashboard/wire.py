"""Updates as they go over the wire: parts that are serialised and deflated once, joined for each viewer.

A part is some members of a JSON object. Its deflated form ends on a byte and refers to nothing before it, so
that parts made at different times can be joined into one gzip stream by putting them one after the other:

    gzip header │ "{" │ figures (for all) │ map (for all) │ rows (of one viewer) │ "keys": […]} │ CRC, length
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

#: RFC 1952: no name, no time, no operating system told.
_HEADER = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"


@dataclass(frozen=True, slots=True)
class Part:
    """Members of an update. `key` names this very content: whoever has it need not get it again."""

    key: str
    value: dict[str, Any]
    text: bytes
    deflated: bytes


def _deflated(text: bytes) -> bytes:
    packer = zlib.compressobj(6, zlib.DEFLATED, -zlib.MAX_WBITS)
    return packer.compress(text) + packer.flush(zlib.Z_FULL_FLUSH)


def _stored(text: bytes, last: bool = False) -> bytes:
    """A few bytes as they are: making a packer for them costs more than all the rest of an update."""
    return struct.pack("<BHH", last, len(text), len(text) ^ 0xFFFF) + text


def members(value: dict[str, Any]) -> bytes:
    """The members of `value` as JSON, each followed by a comma."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return (text[1:-1] + ",").encode() if value else b""


def part(key: str, value: dict[str, Any]) -> Part:
    """Serialise and deflate once."""
    text = members(value)
    return Part(key, value, text, _deflated(text))


def _ends(parts: Sequence[Part]) -> tuple[bytes, bytes]:
    return b"{", f'"keys":{json.dumps([p.key for p in parts])}}}'.encode()


def plain(parts: Sequence[Part]) -> bytes:
    """One JSON object with the members of all parts and `keys`, the parts' keys."""
    head, tail = _ends(parts)
    return b"".join([head, *(p.text for p in parts), tail])


def gzipped(parts: Sequence[Part]) -> bytes:
    """The same as a gzip stream."""
    head, tail = _ends(parts)
    text = plain(parts)
    body = [_HEADER, _stored(head), *(p.deflated for p in parts), _stored(tail, last=True)]
    return b"".join([*body, struct.pack("<II", zlib.crc32(text), len(text) & 0xFFFFFFFF)])


def merged(parts: Sequence[Part]) -> dict[str, Any]:
    """The same as an object, for who needs no bytes."""
    out: dict[str, Any] = {}
    for each in parts:
        out |= each.value
    return out
