from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rag.errors import PromptTooLong, UnstableTemplate
from rag.order import canonical
from rag.prompt import Prompt, PromptDocument, PromptLayout, PromptSegment, Turn
from rag.template import ChatTemplate, LiteralEncoder
from tests.rag.tokenizers_for_tests import CHATML, NO_SYSTEM, THINKING, WITH_CLOCK, byte_tokenizer

TOKENIZER = byte_tokenizer()
LAYOUT = PromptLayout(TOKENIZER)
MARKERS = ["<|im_start|>", "<|im_end|>", "<think>", "</s>"]
words = st.lists(st.sampled_from(["word", "ferry", "保修", " ", "\n", *MARKERS]), max_size=12).map("".join)
documents = st.lists(
    st.builds(PromptDocument, st.sampled_from("abcdef"), st.sampled_from(["c1", "c2"]), words, words),
    max_size=4,
).map(lambda ds: list({d.document_id: d for d in ds}.values()))


def build(**changes: Any) -> Prompt:
    arguments: dict[str, Any] = {
        "instructions": "Be exact.",
        "documents": [],
        "history": [],
        "question": "How many?",
        "account": "ann",
        "budget_tokens": 10_000,
    }
    return LAYOUT.build(**{**arguments, **changes})


DOCS = [
    PromptDocument("b", "c1", "Buoy", "The buoy text.", weight=2.0),
    PromptDocument("a", "c1", "Ferry", "The ferry text.", weight=1.0),
]


def test_the_layout_and_its_scopes() -> None:
    prompt = build(documents=DOCS, history=[Turn("user", "Hi"), Turn("assistant", "Hello")])
    assert [(s.origin, s.scope_kind, s.scope_id, s.document) for s in prompt.segments] == [
        ("instructions", "public", "", None),
        ("document", "collection", "c1", "a"),
        ("document", "collection", "c1", "b"),
        ("template", "public", "", None),
        ("history", "account", "ann", None),
        ("history", "account", "ann", None),
        ("question", "account", "ann", None),
    ]
    assert TOKENIZER.decode(prompt.token_ids) == (
        "<|im_start|>system\nBe exact.\n\n# Ferry\n\nThe ferry text.\n\n# Buoy\n\nThe buoy text.\n\n"
        "<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"
        "<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n"
    )


@settings(deadline=None, max_examples=100)
@given(
    documents, st.lists(st.tuples(words, st.lists(st.integers(300, 320), max_size=5)), min_size=1, max_size=4)
)
def test_each_turn_begins_with_exactly_the_one_before_and_its_answer(
    docs: list[PromptDocument], turns: list[tuple[str, list[int]]]
) -> None:
    history: list[Turn] = []
    before: list[int] = []
    settled: tuple[PromptDocument, ...] = ()
    for question, answer in turns:
        prompt = build(documents=docs, history=history, question=question, settled=settled)
        assert prompt.token_ids[: len(before)] == before
        before = prompt.token_ids + answer
        settled = prompt.documents
        history += [Turn("user", question), Turn("assistant", token_ids=tuple(answer))]


def test_a_generated_end_of_turn_is_not_written_twice() -> None:
    end = LAYOUT.template.answer_end
    with_end = build(history=[Turn("user", "Q"), Turn("assistant", token_ids=(300, end[0]))])
    without = build(history=[Turn("user", "Q"), Turn("assistant", token_ids=(300,))])
    assert with_end.token_ids == without.token_ids


@settings(deadline=None, max_examples=100)
@given(documents, words, words)
def test_no_text_becomes_a_control_token(docs: list[PromptDocument], question: str, reply: str) -> None:
    prompt = build(documents=docs, question=question, history=[Turn("user", reply), Turn("assistant", reply)])
    template = LAYOUT.template
    fixed = [*template.opening, *template.preamble_end, *template.user_end * 2, *template.answer_end]
    control = LAYOUT.encode.control_ids
    count = sum(t in control for t in prompt.token_ids)
    assert count == sum(t in control for t in fixed)


@settings(deadline=None)
@given(words)
def test_literal_encoding_loses_nothing(text: str) -> None:
    assert TOKENIZER.decode(LAYOUT.encode(text)) == text


@given(st.permutations(DOCS))
def test_the_same_documents_give_the_same_ids_for_everybody(order: list[PromptDocument]) -> None:
    ann = build(documents=order, account="ann", question="One?")
    bob = build(documents=DOCS, account="bob", question="Two?")
    shared = sum(len(s.tokens) for s in ann.segments if s.scope_kind != "account")
    assert ann.token_ids[:shared] == bob.token_ids[:shared]
    assert {s.scope_id for s in bob.segments if s.scope_kind == "account"} == {"bob"}


def test_a_document_is_tokenised_once(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = PromptLayout(TOKENIZER)
    seen: list[str] = []
    real = layout.encode
    layout.encode = lambda text: seen.append(text) or real(text)  # type: ignore[assignment,return-value]
    for question in ("One?", "Two?"):
        layout.build(
            instructions="I", documents=DOCS, history=[], question=question, account="a", budget_tokens=999
        )
    assert sum("ferry text" in text for text in seen) == 1


def test_the_same_text_is_tokenised_again_for_another_collection() -> None:
    """Else the time that it takes would tell whether somebody else's collection holds it."""
    layout = PromptLayout(TOKENIZER)
    seen: list[str] = []
    real = layout.encode
    layout.encode = lambda text: seen.append(text) or real(text)  # type: ignore[assignment,return-value]
    hers = PromptDocument("d1", "ann's", "Pay", "The PIN is 4711.")
    ids = [layout.document_tokens(hers) for _ in range(2)]
    assert len(seen) == 1
    ids.append(layout.document_tokens(replace(hers, document_id="d2", collection_id="bob's")))
    assert len(seen) == 2
    assert ids[0] == ids[1] == ids[2]


def test_overflow_drops_the_oldest_turns_and_then_the_lightest_document() -> None:
    history = [
        Turn("user", "old " * 30),
        Turn("assistant", "x " * 30),
        Turn("user", "new"),
        Turn("assistant", "y"),
    ]
    whole = build(documents=DOCS, history=history)
    assert (whole.dropped_turns, whole.dropped_documents) == (0, ())
    one = build(documents=DOCS, history=history, budget_tokens=whole.token_count - 1)
    assert (one.dropped_turns, one.dropped_documents) == (2, ())
    assert one.token_count == build(documents=DOCS, history=history[2:]).token_count
    bare = build(documents=DOCS)
    less = build(documents=DOCS, history=history, budget_tokens=bare.token_count - 1)
    assert less.dropped_turns == 4
    assert [d.document_id for d in less.dropped_documents] == ["a"]
    assert less.token_count <= bare.token_count - 1


@settings(deadline=None)
@given(st.integers(30, 400), st.integers(0, 6))
def test_no_prompt_exceeds_its_budget(budget: int, turns: int) -> None:
    history = [Turn("user" if i % 2 == 0 else "assistant", "some words " * (i + 1)) for i in range(turns)]
    least = build(documents=[]).token_count
    if budget < least:
        with pytest.raises(PromptTooLong) as caught:
            build(documents=DOCS, history=history, budget_tokens=budget)
        assert (caught.value.tokens, caught.value.limit) == (least, budget)
    else:
        assert build(documents=DOCS, history=history, budget_tokens=budget).token_count <= budget


def test_a_question_that_cannot_fit_says_so() -> None:
    with pytest.raises(PromptTooLong, match=r"there is room for 500\. Shorten it"):
        build(question="word " * 10_000, budget_tokens=500)


def test_new_documents_join_the_front_while_the_history_is_short() -> None:
    first = build(documents=[DOCS[0]])
    history = [Turn("user", "Q"), Turn("assistant", "A")]
    long = PromptDocument("new", "c1", "New", "many words " * 50)
    prompt = build(documents=[DOCS[0], long], history=history, settled=first.documents)
    assert [d.document_id for d in prompt.documents] == ["b", "new"]  # the settled one keeps its place
    assert prompt.appended == ()


def test_behind_a_long_history_they_are_private_and_stay_there() -> None:
    history = [Turn("user", "Q " * 100), Turn("assistant", "A " * 100)]
    small = PromptDocument("new", "c1", "New", "few words")
    prompt = build(documents=[DOCS[0], small], history=history, settled=(DOCS[0],))
    assert [d.document_id for d in prompt.documents] == ["b"]
    assert prompt.appended == (small,)
    private = next(s for s in prompt.segments if s.document == "new")
    assert (private.scope_kind, private.scope_id, private.origin) == ("account", "ann", "document")
    history += [Turn("user", "How many?", documents=prompt.appended), Turn("assistant", token_ids=(300,))]
    after = build(documents=[DOCS[0]], history=history, settled=prompt.documents, question="And?")
    assert after.token_ids[: prompt.token_count + 1] == [*prompt.token_ids, 300]


class Memory:
    """Holds prefixes of ids, as the engine's tree does."""

    def __init__(self, *prompts: Prompt) -> None:
        self.held = [p.token_ids for p in prompts]

    def resident_tokens(self, segments: Sequence[PromptSegment]) -> int:
        ids = [t for s in segments for t in s.tokens]
        best = 0
        for held in self.held:
            common = next(
                (i for i, (a, b) in enumerate(zip(ids, held, strict=False)) if a != b),
                min(len(ids), len(held)),
            )
            best = max(best, common)
        return best


def test_what_is_in_memory_comes_first() -> None:
    alone = build(documents=[DOCS[0]])
    prompt = build(documents=DOCS, residency=Memory(alone))
    assert [d.document_id for d in prompt.documents] == ["b", "a"]
    assert [d.document_id for d in build(documents=DOCS, residency=Memory()).documents] == ["a", "b"]


@given(st.permutations("abcd"), st.permutations("abcd"))
def test_reuse_aware_order_keeps_all_and_finds_a_resident_chain(chain: list[str], given: list[str]) -> None:
    docs = {name: PromptDocument(name, "c", name, name * 40) for name in "abcd"}
    held = build(documents=list(docs.values()), settled=[docs[n] for n in chain[:2]])
    names = [
        d.document_id for d in build(documents=[docs[n] for n in given], residency=Memory(held)).documents
    ]
    assert sorted(names) == list("abcd")
    assert names == [d.document_id for d in held.documents]
    assert [d.document_id for d in canonical([docs[n] for n in given])] == list("abcd")


def test_spare_documents_fill_the_places_with_what_is_in_memory() -> None:
    wanted, other, held = DOCS[0], DOCS[1], PromptDocument("c", "c1", "Crane", "The crane text.")
    before = build(documents=[held])
    given: dict[str, Any] = {"documents": [wanted], "spare": [other, held]}
    prompt = build(**given, places=2, residency=Memory(before))
    assert [d.document_id for d in prompt.documents] == ["c", "b"]
    assert [d.document_id for d in build(**given, places=2).documents] == ["a", "b"]
    assert [d.document_id for d in build(**given, places=1, residency=Memory(before)).documents] == ["b"]
    assert [d.document_id for d in build(**given, residency=Memory(before)).documents] == ["b"]


def test_spare_documents_push_nothing_out() -> None:
    history = [Turn("user", "old " * 30), Turn("assistant", "x " * 30)]
    bare = build(documents=[DOCS[0]], history=history)
    tight = build(
        documents=[DOCS[0]], spare=[DOCS[1]], places=2, history=history, budget_tokens=bare.token_count + 5
    )
    assert (tight.documents, tight.dropped_turns, tight.dropped_documents) == (bare.documents, 0, ())


def test_new_documents_behind_a_long_history_bring_no_spare_ones() -> None:
    history = [Turn("user", "Q " * 100), Turn("assistant", "A " * 100)]
    small = PromptDocument("new", "c1", "New", "few words")
    prompt = build(documents=[DOCS[0], small], spare=[DOCS[1]], places=3, history=history, settled=(DOCS[0],))
    assert [d.document_id for d in prompt.documents] == ["b"]
    assert prompt.appended == (small,)


def test_a_spare_document_of_the_turn_before_keeps_its_place() -> None:
    settled = (DOCS[1], DOCS[0])
    history = [Turn("user", "Q"), Turn("assistant", "A")]
    prompt = build(documents=[DOCS[0]], spare=[DOCS[1]], places=2, history=history, settled=settled)
    assert prompt.documents == settled


# Templates


def test_a_model_without_a_system_role_reads_the_preamble_in_its_first_question() -> None:
    tokenizer = byte_tokenizer(NO_SYSTEM)
    layout = PromptLayout(tokenizer)
    assert not layout.template.has_system
    prompt = layout.build(
        instructions="Be exact.",
        documents=[DOCS[1]],
        history=[],
        question="Q",
        account="a",
        budget_tokens=999,
    )
    assert tokenizer.decode(prompt.token_ids) == "[U]Be exact.\n\n# Ferry\n\nThe ferry text.\n\n\n\nQ[A]"


def test_a_clock_in_the_template_stands_still() -> None:
    assert "01 Jan 2025" in TOKENIZER.decode(ChatTemplate.probe(byte_tokenizer(WITH_CLOCK)).opening)


def test_thinking_templates_keep_what_was_generated() -> None:
    """The template would drop the think block from earlier answers; ours carries on what was really there."""
    tokenizer = byte_tokenizer(THINKING)
    layout = PromptLayout(tokenizer)
    assert tokenizer.decode(layout.template.user_end).endswith("assistant\n<think>\n\n</think>\n\n")


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ messages|length }}" + CHATML, "before the first question"),
        ("{% for m in messages %}{{ m['content']|lower }}{% endfor %}", "drops, repeats or reorders"),
        ("{% for m in messages|reverse %}{{ m['content'] }}{% endfor %}", "drops, repeats or reorders"),
        ("{{ raise_exception('no roles at all') }}", "no roles at all"),
    ],
)
def test_an_unstable_template_is_refused(template: str, why: str) -> None:
    with pytest.raises(UnstableTemplate, match=why):
        ChatTemplate.probe(byte_tokenizer(template))


def test_markers_that_are_not_marked_special_are_text_too() -> None:
    encode = LiteralEncoder(TOKENIZER)
    think = TOKENIZER.convert_tokens_to_ids("<think>")
    assert think in TOKENIZER.encode("<think>", add_special_tokens=False, split_special_tokens=True)
    assert think not in encode("a <think> b")
