"""Streamed text equals decoded text, whatever the tokenizer; nothing is shown too early."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from engine.detokenize import REPLACEMENT, IncrementalDetokenizer, StopChecker, TextStream

SPECIALS = ["<s>", "</s>", "<unk>"]
CORPUS = [
    "the cat sat on the mat, the end. ",
    "größer naïve café 東京 héllo",
    "don't  stop\n\nnow \t ok",
] * 20


def _wrap(backend: Tokenizer) -> Any:
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=True,
    )


@functools.cache
def byte_level() -> Any:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=400, special_tokens=SPECIALS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
        ),
    )
    tokenizer = _wrap(backend)
    tokenizer.add_tokens(["<tool call>"])
    return tokenizer


@functools.cache
def sentencepiece() -> Any:
    """As Llama 2's: ▁ for spaces, byte fallback, one leading space added and stripped."""
    vocab = {token: i for i, token in enumerate(SPECIALS)}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    for character in "▁abcdefghijklmnopqrstuvwxyz.,'ö":
        vocab[character] = len(vocab)
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("a", "t"), ("▁", "▁")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    backend = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _wrap(backend)


@functools.cache
def word_piece() -> Any:
    """Text that depends on neighbours: the general way has to be taken."""
    words = ["the", "cat", "##s", "##ting", "sat", ".", ",", "mat", "on", "é", "##é"]
    vocab = {token: i for i, token in enumerate([*SPECIALS, *words])}
    backend = Tokenizer(models.WordPiece(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    return _wrap(backend)


@functools.cache
def metaspace() -> Any:
    words = ["▁the", "▁cat", "s", "▁", "▁▁", "sat", ".", "é"]
    vocab = {token: i for i, token in enumerate([*SPECIALS, *words])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.decoder = decoders.Metaspace()
    return _wrap(backend)


MAKERS = [byte_level, sentencepiece, word_piece, metaspace]


def _decode(tokenizer: Any, ids: list[int]) -> str:
    text: str = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize(
    "text", ["the cats sat.", "größer 東京 😀 naïve", "  two  spaces\n\nend ", "don't, the", ""]
)
def test_streamed_text_is_decoded_text(make: Any, text: str) -> None:
    tokenizer = make()
    ids = tokenizer.encode(text, add_special_tokens=False)
    one = IncrementalDetokenizer(tokenizer)
    parts = [one.push([token]) for token in ids]
    assert "".join(parts) + one.finish() == _decode(tokenizer, ids)
    assert not any(REPLACEMENT in part for part in parts)
    assert IncrementalDetokenizer(tokenizer).push(ids) == "".join(parts)


@pytest.mark.parametrize("make", [byte_level, word_piece, metaspace])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_ids_give_what_decode_gives(make: Any, data: st.DataObject) -> None:
    """Random ids, invalid UTF-8 and special tokens included; only an unfinished end may be missing."""
    tokenizer = make()
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=24))
    stream = IncrementalDetokenizer(tokenizer)
    text = stream.push(ids)
    pending = stream.pending
    text += stream.finish()
    want = _decode(tokenizer, ids)
    assert text == want if not pending else text == want.rstrip(REPLACEMENT) or text + REPLACEMENT == want


@settings(max_examples=100, deadline=None)
@given(text=st.text(alphabet="the cat.é😀東", max_size=30))
def test_byte_fallback_round_trip(text: str) -> None:
    tokenizer = sentencepiece()
    ids = tokenizer.encode(text, add_special_tokens=False)
    stream = IncrementalDetokenizer(tokenizer)
    parts = [stream.push([token]) for token in ids]
    assert not stream.pending
    assert "".join(parts) == _decode(tokenizer, ids)
    assert not any(REPLACEMENT in part for part in parts)


def test_half_characters_wait() -> None:
    tokenizer = sentencepiece()
    ids = [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in "😀!".encode()]
    stream = IncrementalDetokenizer(tokenizer)
    assert [stream.push([token]) for token in ids[:3]] == ["", "", ""]
    assert stream.pending
    assert stream.push([ids[3]]) == "😀"
    assert not stream.pending
    assert stream.push([ids[4]]) == "!"
    stream.push([ids[0]])
    assert stream.finish() == ""


def test_a_replacement_character_that_was_really_written_is_shown() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode(f"a{REPLACEMENT}b", add_special_tokens=False)
    stream = IncrementalDetokenizer(tokenizer)
    assert stream.push(ids) == f"a{REPLACEMENT}b"


def test_special_tokens_are_skipped_and_added_ones_are_not() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("the<tool call>cat</s>", add_special_tokens=False)
    assert tokenizer.eos_token_id in ids
    assert IncrementalDetokenizer(tokenizer).push([tokenizer.bos_token_id, *ids]) == "the<tool call>cat"


def test_ids_beyond_the_vocabulary_are_empty() -> None:
    assert IncrementalDetokenizer(byte_level()).push([len(byte_level()) + 5]) == ""


# Stop strings


def test_text_that_may_begin_a_stop_string_is_held_back() -> None:
    stop = StopChecker(["\nUser:", "###"])
    assert [stop.push(part) for part in ["Hi", "\n", "Us", "a", "#", "#"]] == ["Hi", "", "", "\nUsa", "", ""]
    assert stop.push("!") == "##!"
    assert stop.push(" \nUser") == " "
    assert not stop.stopped
    assert stop.push(": hello") == ""
    assert stop.stopped
    assert stop.kept_tokens == 7
    assert stop.push("more") == ""
    assert stop.finish() == ""


def test_held_text_is_shown_when_the_answer_ends() -> None:
    stop = StopChecker(["STOP"])
    assert stop.push("no ST") == "no "
    assert stop.finish() == "ST"
    assert stop.kept_tokens == 1


def test_kept_tokens_end_with_the_last_whole_token() -> None:
    stop = StopChecker(["bc"])
    assert stop.push("x") + stop.push("ab") + stop.push("cd") == "xa"
    assert stop.kept_tokens == 1  # "ab" reaches into the stop string
    stop = StopChecker(["bc"])
    stop.push("xa")
    stop.push("", whole=True)  # a special token: whole, without text
    stop.push("", whole=False)  # half of what becomes "b"
    stop.push("bc")
    assert stop.kept_tokens == 2


def test_the_earliest_of_several_stop_strings_counts() -> None:
    stop = StopChecker(["cd", "bcd"])
    assert stop.push("abcd") == "a"


@settings(max_examples=200, deadline=None)
@given(
    parts=st.lists(st.text(alphabet="ab#", max_size=4), max_size=12),
    stops=st.lists(st.text(alphabet="ab#", min_size=1, max_size=4), max_size=3),
)
def test_stop_checker_against_a_search_in_the_whole_text(parts: list[str], stops: list[str]) -> None:
    checker = StopChecker(stops)
    shown = ""
    for count, part in enumerate(parts):
        shown += checker.push(part)
        text = "".join(parts[: count + 1])
        hits = [text.find(stop) for stop in stops if stop in text]
        assert checker.stopped == bool(hits)
        if hits:
            assert shown == text[: min(hits)]
            ends = [len("".join(parts[: n + 1])) for n in range(count + 1)]
            assert checker.kept_tokens == sum(end <= min(hits) for end in ends)
            return
        assert text.startswith(shown)
        held = text[len(shown) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)
    assert shown + checker.finish() == "".join(parts)


@pytest.mark.parametrize("make", MAKERS)
def test_stream_with_stop_strings(make: Any) -> None:
    tokenizer = make()
    ids = tokenizer.encode("the cats sat, the cats", add_special_tokens=False)
    whole = _decode(tokenizer, ids)
    stop = whole[len(whole) // 2 : len(whole) // 2 + 3]
    stream = TextStream(tokenizer, [stop])
    shown = ""
    for token in ids:
        update = stream.push([token])
        shown += update.text
        if update.stopped:
            break
    assert update.stopped
    assert shown == stream.text == whole[: whole.index(stop)]
    assert whole.startswith(_decode(tokenizer, ids[: update.kept_tokens]))
    assert len(_decode(tokenizer, ids[: update.kept_tokens])) <= len(shown)
    assert stream.finish().text == ""


def test_stream_without_stop_strings_keeps_every_token() -> None:
    tokenizer = byte_level()
    rng = random.Random(0)
    ids = [rng.randrange(len(tokenizer)) for _ in range(200)]
    stream = TextStream(tokenizer)
    text = "".join(stream.push([token]).text for token in ids)
    last = stream.finish()
    assert stream.text == text + last.text
    assert last.kept_tokens == 200
