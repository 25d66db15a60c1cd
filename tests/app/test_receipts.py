"""The receipt in words: what is measured, what is an estimate, and from what."""

from __future__ import annotations

from dataclasses import replace

import pytest

from app import receipts
from app.pages.words import ENGLISH, Words
from app.receipts import PrefillRate, receipt_json
from tests.app.fakes import receipt


def test_the_estimate_comes_from_what_was_measured() -> None:
    rate = PrefillRate()
    assert receipt_json(receipt(20, 10, 5), rate)["prefill_avoided_s"] is None, "nothing was measured yet"
    first = replace(receipt(300, 100, 5), ttft_s=0.6, queued_s=0.1)
    stored = receipt_json(first, rate)
    assert (stored["prefill_tokens_per_s"], stored["prefill_answers"]) == (400.0, 1)
    assert stored["prefill_avoided_s"] == 0.25
    text = receipts.table(stored, ENGLISH)
    assert "about 0.2 s: 100 tokens at 400 tokens/s, as measured over the last 1 answer" in text
    assert "Reading avoided (estimate)" in text


@pytest.mark.parametrize(
    "change", [{"ttft_s": None}, {"waited_for_prefill": True}, {"preemptions": 1}, {"queued_s": 0.25},
               {"computed_tokens": 31}],
)  # fmt: skip
def test_answers_that_say_nothing_about_prefill_are_left_out(change: dict[str, object]) -> None:
    rate = PrefillRate()
    rate.note(replace(receipt(300, 100, 5), **change))
    assert rate.measured() is None


def test_the_rate_follows_the_last_answers() -> None:
    rate = PrefillRate()
    for _ in range(60):
        rate.note(replace(receipt(300, 100, 5), ttft_s=1.0))
    assert rate.measured() == (200.0, PrefillRate.KEPT)


def test_one_is_one_and_old_receipts_are_shown() -> None:
    stored = receipt_json(receipt(20, 19, 1))
    for key in ("prefill_tokens_per_s", "prefill_answers", "prefill_avoided_s"):
        del stored[key]
    text = receipts.table(stored, ENGLISH)
    assert "| Copied on divergence | 1 block, 2.0 KiB |" in text
    assert "| Answer | 1 token |" in text
    assert "estimate" not in text
    assert "1 block was copied" in receipts.copied(stored, ENGLISH)
    assert "19 of 20 prompt tokens reused (95%)" in receipts.headline(stored, ENGLISH)


def test_drafts_private_places_and_shared_waiting_are_told() -> None:
    full = replace(receipt(300, 100, 5), drafted_tokens=9, accepted_tokens=4, waited_for_prefill=True)
    text = receipts.table(receipt_json(full), ENGLISH, private="The mill")
    assert "| Drafted tokens accepted | 4 of 9 |" in text
    assert "| Placed privately | The mill: found in a later turn." in text
    assert "more than twice the cost" in text
    assert "waited for another reader" in text
    chinese = receipts.table(receipt_json(full), Words("zh-Hant"), private="The mill")
    assert "| 採納的預測 token | 9 個中的 4 個 |" in chinese
