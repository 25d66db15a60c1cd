from __future__ import annotations

import codecs

import pytest

from rag.errors import ParseFailed
from rag.parse.decode import decode

GERMAN = "Der Geschäftsführer prüft die Rückerstattung – die Gebühr von 45 € ist „sofort“ fällig. Größe."
CHINESE = "本公司的退货政策规定，客户可以在三十天内退回产品。请联系客服部门获取更多信息。保修期为两年。"
JAPANESE = "返品ポリシーによると、お客様は三十日以内に製品を返品できます。詳細はカスタマーサービスへ。"
KOREAN = "반품 정책에 따르면 고객은 30일 이내에 제품을 반품할 수 있습니다. 자세한 내용은 문의하십시오."


@pytest.mark.parametrize(
    ("text", "encoding", "named"),
    [
        (GERMAN, "utf-8", "utf-8"),
        (GERMAN, "cp1252", "cp1252"),
        ("Café déjà vu – 12 €", "cp1252", "cp1252"),
        (CHINESE, "gb18030", "gb18030"),
        ("保修期为两年。", "gb18030", "gb18030"),
        (JAPANESE, "shift_jis", "shift_jis"),
        ("保証期間は二年です。", "shift_jis", "shift_jis"),
        (KOREAN, "euc-kr", "euc-kr"),
        ("보증 기간은 2년입니다.", "euc-kr", "euc-kr"),
        (JAPANESE, "euc_jp", "euc-jp"),
        ("本公司的退貨政策規定，客戶可以在三十天內退回產品。", "big5", "big5"),
        (GERMAN, "utf-16-le", "utf-16-le"),
        (GERMAN, "utf-16-be", "utf-16-be"),
    ],
)
def test_what_people_have_is_read_as_it_was_written(text: str, encoding: str, named: str) -> None:
    found = decode(text.encode(encoding))
    assert (found.text, found.encoding) == (text, named)
    assert 0.5 < found.confidence <= 1


@pytest.mark.parametrize(
    ("bom", "encoding"),
    [(codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be")],
)
def test_a_byte_order_mark_decides_and_is_no_text(bom: bytes, encoding: str) -> None:
    found = decode(bom + KOREAN.encode(encoding))
    assert found.text == KOREAN
    assert found.confidence == 1.0


def test_utf8_that_was_cut_off_is_still_utf8() -> None:
    assert decode((CHINESE * 10).encode()[:-1]).text.startswith(CHINESE)


def test_random_bytes_are_refused_rather_than_read_as_something() -> None:
    noise = bytes((i * 197 + 91) % 255 + 1 for i in range(3000))
    with pytest.raises(ParseFailed) as caught:
        decode(noise)
    assert caught.value.reason == "encoding"


def test_binary_is_no_text() -> None:
    with pytest.raises(ParseFailed) as caught:
        decode(b"\x7fELF\x02\x01\x01\x00\x00\x00" + bytes(range(256)) * 4)
    assert caught.value.reason == "not text"
