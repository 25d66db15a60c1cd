"""Bytes to text, with the encoding's name and a confidence; never silently wrong.

Valid UTF-8 is UTF-8. Otherwise charset-normalizer ranks the few encodings that people really have, and
where it finds several equally clean the one whose script mixture is plausible wins: GBK bytes read as
Korean give Hangul and Hanja side by side, which nobody writes.
"""

from __future__ import annotations

import codecs
from dataclasses import dataclass

from charset_normalizer import from_bytes

from rag.errors import ParseFailed

#: In order of preference among equals.
CANDIDATES = ("cp1252", "cp932", "gb18030", "cp949", "big5", "euc_jp", "cp1251", "cp1250")
#: Names that people know, where Python's superset has another one.
NAMES = {"cp932": "shift_jis", "cp949": "euc-kr", "euc_jp": "euc-jp"}
_SAMPLE = 256 * 1024
_BOMS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


@dataclass(frozen=True, slots=True)
class Decoded:
    text: str
    encoding: str
    confidence: float


def decode(data: bytes, declared: str | None = None) -> Decoded:
    """Decode a text file. `declared` is what the file itself says (an HTML meta tag), used if it decodes.

    Raises `ParseFailed` ("encoding" or "not text").
    """
    for bom, encoding in _BOMS:
        if data.startswith(bom):
            # A file cut in the middle of a character loses that character only.
            text = _decode_mostly(data, encoding)
            if text is None:
                raise _failed(f"it begins like {encoding}, but does not decode as such")
            return Decoded(text, encoding.removesuffix("-sig"), 1.0)
    if declared and (text := _try(data, declared)) is not None:
        return Decoded(text, declared.lower(), 0.95)
    if b"\0" not in data and (text := _try(data, "utf-8")) is not None:
        return Decoded(text, "utf-8", 1.0)
    if (wide := _without_bom_utf16(data)) is not None:
        return wide
    if b"\0" in data:
        raise ParseFailed("not text", "The file is binary, not text, and of no format that can be read.")
    if (text := _decode_mostly(data, "utf-8")) is not None and sum(c > "\x7f" for c in text) > text.count(
        "\ufffd"
    ) * 2:
        return Decoded(text, "utf-8", 0.9)
    return _detect(data)


def _detect(data: bytes) -> Decoded:
    matches = [
        match
        for match in from_bytes(data[:_SAMPLE], cp_isolation=list(CANDIDATES), threshold=0.2)
        if match.encoding in CANDIDATES
    ]
    ranked: list[tuple[float, int, str, str]] = []
    for match in matches:
        text = _try(data, match.encoding)
        if text is not None:
            # charset-normalizer keeps one of several encodings that read the same; name the usual one.
            if match.encoding == "cp1250" and _try(data, "cp1252") == text:
                ranked.append((round(match.chaos, 2), 0, "cp1252", text))
                continue
            oddness = match.chaos + _implausible(text)
            ranked.append((round(oddness, 2), CANDIDATES.index(match.encoding), match.encoding, text))
    if not ranked:
        # Too short or too odd for statistics: take the single-byte reading only where every byte is a letter.
        text = _try(data, "cp1252")
        if text is not None and _implausible(text) == 0 and any(c.isalpha() for c in text):
            return Decoded(text, "cp1252", 0.5)
        raise _failed("no known encoding fits")
    ranked.sort()
    oddness, _, encoding, text = ranked[0]
    if oddness > 0.4:
        raise _failed("no known encoding gives readable text")
    rivals = [r for r in ranked[1:] if r[0] - oddness < 0.05 and r[3] != text]
    confidence = max(0.0, 1.0 - oddness) * (0.7 if rivals else 0.95)
    return Decoded(text, NAMES.get(encoding, encoding), round(confidence, 2))


def _implausible(text: str) -> float:
    """0 for text that somebody may have written, up to 1 for what only a wrong decoding produces."""
    counts = {"han": 0, "hangul": 0, "kana": 0, "halfwidth": 0, "odd": 0}
    for char in text[:20_000]:
        code = ord(char)
        if 0x4E00 <= code <= 0x9FFF or 0x3400 <= code <= 0x4DBF:
            counts["han"] += 1
        elif 0xAC00 <= code <= 0xD7A3:
            counts["hangul"] += 1
        elif 0x3040 <= code <= 0x30FF:
            counts["kana"] += 1
        elif 0xFF61 <= code <= 0xFF9F:
            counts["halfwidth"] += 1
        elif (
            0x80 <= code <= 0x9F
            or 0xE000 <= code <= 0xF8FF
            or code == 0xFFFD
            or (code < 32 and char not in "\t\n\r\f")
        ):
            counts["odd"] += 1
    east = counts["han"] + counts["hangul"] + counts["kana"] + counts["halfwidth"]
    badness = counts["odd"] / max(1, len(text[:20_000])) * 10
    if east:
        if counts["hangul"] and counts["han"]:
            badness += min(counts["hangul"], counts["han"]) / east
        badness += counts["halfwidth"] / east
        if counts["kana"] and counts["hangul"]:
            badness += min(counts["kana"], counts["hangul"]) / east
    return min(1.0, badness)


def _without_bom_utf16(data: bytes) -> Decoded | None:
    head = data[:4096]
    if len(head) < 4:
        return None
    even, odd = head[0::2].count(0) / (len(head) / 2), head[1::2].count(0) / (len(head) / 2)
    for share, other, encoding in ((odd, even, "utf-16-le"), (even, odd, "utf-16-be")):
        if share > 0.4 and other < 0.05:
            text = _decode_mostly(data, encoding)
            if text is not None and "\0" not in text:
                return Decoded(text, encoding, 0.9)
    return None


def _try(data: bytes, encoding: str) -> str | None:
    try:
        return data.decode(encoding)
    except (UnicodeError, LookupError):
        return None


def _decode_mostly(data: bytes, encoding: str) -> str | None:
    """Text in which at most 1 % of the characters are replaced, else None."""
    text = data.decode(encoding, errors="replace")
    return text if text.count("\ufffd") <= max(1, 0.01 * len(text)) else None


def _failed(why: str) -> ParseFailed:
    return ParseFailed("encoding", f"The text can't be decoded: {why}. Save it as UTF-8 and upload it again.")
