"""Both languages have every text, and nothing on the pages goes past the catalogues."""

from __future__ import annotations

import ast
import functools
import json
import re
import string
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.errors import QuestionRefused, TitleRefused
from app.pages import words, words_page
from app.pages.build import build_demo
from app.pages.words import LANGUAGES, MARK, TEXTS, Words, filled, from_stored, phrase
from app.render import counted
from app.runtime import Runtime
from app.server import create_app

PAGES = Path(__file__).resolve().parents[2] / "app" / "pages"
#: Pages whose every text is in the catalogues.
TRANSLATED = ("build.py", "handlers.py", "conversations.py", "desk.py", "transcript.py", "library_panel.py")
MARKED_UP = ("brand.html", "desk.html", "desk.js", "memory_map.html", "memory_map.js", "brand.js", "say.js",
             "library.html", "library_core.js", "library_dialog.js", "library_upload.js", "library_list.js",
             "library_document.js", "library_live.js")  # fmt: skip
#: What is the same in every language: names of things, signs, and the switch, which names the *other* one.
SAME = {"account.of", "panel.engine_is", "page.other_language", "page.other_code", "panel.two", "panel.three"}


def places(text: str) -> set[str]:
    return {name for _, name, _, _ in string.Formatter().parse(text) if name is not None}


@pytest.mark.parametrize("key", sorted(TEXTS))
def test_both_languages_say_the_same(key: str) -> None:
    english, chinese = TEXTS[key]
    assert english.strip(), key
    assert chinese.strip(), key
    if re.search("[A-Za-z]{2}", re.sub(r"{.*?}", "", english)) and key not in SAME:
        assert re.search("[\u3400-\u9fff]", chinese), "not translated"
    for part in english.split("|"):
        assert places(part) <= places(english.split("|")[-1])
    assert places(chinese) == places(english.split("|")[-1]), key
    assert "|" not in english or "n" in places(english) or english == "Source|Sources"
    assert "|" not in chinese


def test_one_and_many() -> None:
    assert filled("{n:,} block|{n:,} blocks", {"n": 1}) == "1 block"
    assert filled("{n:,} block|{n:,} blocks", {"n": 1_200}) == "1,200 blocks"
    assert Words("zh-Hant")("stage.queue", place=2) == "排隊中，第 2 位"


def test_a_stored_phrase_is_said_in_every_language() -> None:
    stored = json.loads(json.dumps(phrase("stage.queue", place=2).stored()))
    assert Words("zh-Hant").tell(from_stored(stored) or "") == "排隊中，第 2 位"
    # What another version stored, or a hand: left out, and never an error.
    values: list[Any] = [None, {}, {"place": []}, {"place": "two"}, {"key": "twice"}, []]
    wrong = [{"key": "stage.queue", "values": each} for each in values]
    for unknown in (*wrong, {"key": "no.such", "values": {}}, {}, None, "x", 3):
        assert from_stored(unknown) is None


#: A number that no `n` decides about, before a noun that stands for many: "1 open readers".
UNDECIDED = re.compile(
    r"\{(?!n[:}])(\w+)(?::[^}]*)?\} (?:(?:open|such|shared|prompt|other) )?"
    r"(?:answers|blocks|conversations|documents|entries|files|pages|parts|passages|people|readers|slots)\b"
)
#: Never one: the blocks of a whole pool, and what it may pin.
ALWAYS_MANY = {"total", "limit"}


@pytest.mark.parametrize("key", sorted(TEXTS))
def test_no_count_is_said_to_be_many_when_it_is_one(key: str) -> None:
    english = TEXTS[key][0]
    for part in english.split("|"):
        assert {found[1] for found in UNDECIDED.finditer(part)} <= ALWAYS_MANY
    if "|" not in english:
        assert not re.search(r"\{n(?::[^}]*)?\} (?:[a-z]+ )?(?:blocks|documents|readers|passages)\b", english)


def test_counts_outside_the_catalogues() -> None:
    assert counted(1, "file") == "1 file"
    assert counted(1_200, "file") == "1,200 files"
    assert counted(0, "file is", "files are") == "0 files are"


def test_what_is_told_of_one_block_and_one_reader() -> None:
    w = Words("en")
    assert w("library.freed_blocks", n=1, size="64 KiB") == "1 block of memory (64 KiB)"
    assert w("library.others", n=1, readers=w("library.heat_open", n=1)) == (
        "Documents that are not shared with you hold 1 block and are open in 1 conversation."
    )
    assert w("library.read_by", n=1, names="Ben") == "1 reader beside you: Ben"
    assert w("panel.block", block=7, state="held", running=1, n=1).endswith(
        "read by 1 running now, open in 1 conversation"
    )


def test_an_unknown_text_is_an_error() -> None:
    for ask in (words.mark, Words("en"), phrase):
        with pytest.raises(words.UnknownText, match=r"no\.such"):
            ask("no.such")
    with pytest.raises(words.UnknownText, match="two catalogues"):
        words._joined([{"a.b": ("a", "b")}, {"a.b": ("c", "d")}])


@pytest.mark.parametrize(
    ("accept", "language"),
    [
        ("", "en"), ("de", "en"), ("zh-TW", "zh-Hant"), ("zh-Hant-HK,en;q=0.5", "zh-Hant"),
        ("en-US,en;q=0.9,zh-TW;q=0.8", "en"), ("de,zh;q=0.7,en;q=0.3", "zh-Hant"), ("zh;q=0, en", "en"),
        ("*", "en"), ("en;q=x,zh", "zh-Hant"), (";;;,,,", "en"),
    ],
)  # fmt: skip
def test_the_browsers_language_is_taken(accept: str, language: str) -> None:
    assert words.language_of({"accept-language": accept}) == language


def test_a_choice_beats_the_browser() -> None:
    for chosen in LANGUAGES:
        headers = {"cookie": f"a=b; {words.COOKIE}={chosen}", "accept-language": "en"}
        assert words.of(headers).language == chosen
    assert words.language_of({"cookie": f"{words.COOKIE}=xx", "accept-language": "zh"}) == "zh-Hant"


def test_errors_are_told_in_the_readers_language() -> None:
    chinese = Words("zh-Hant")
    known = QuestionRefused(phrase("refused.long", n=20_000, limit=8_000))
    assert str(known).startswith("The question has 20,000 characters; at most 8,000")
    assert chinese.sentence(known) == "問題有 20,000 個字元，最多接受 8,000 個。長文請改以文件加入。"
    assert Words("en").sentence(known) == str(known)
    coded = TitleRefused("A title has 1 to 80 characters; this one has 90.")
    assert chinese.sentence(coded) == f"這個標題無法接受。（{coded}）"
    assert chinese.tell("plain") == "plain"


def test_every_code_that_can_be_shown_has_a_name() -> None:
    import engine.errors
    import rag.errors
    from app import errors

    startup = {"invalid_setting", "data_dir_unusable", "port_unavailable", "data_dir_unwritable",
               "data_dir_locked", "unstable_template", "integrity"}  # fmt: skip
    for module in (errors, engine.errors, rag.errors):
        for error in vars(module).values():
            if isinstance(error, type) and issubclass(error, Exception) and hasattr(error, "code"):
                assert error.code in startup or f"error.{error.code}" in TEXTS, error


@pytest.mark.parametrize("name", MARKED_UP)
def test_marks_are_known_and_safe_where_they_stand(name: str) -> None:
    """Scripts and templates get texts as they are: nothing in one may end a string, a tag or a template."""
    found = MARK.findall((PAGES / name).read_text(encoding="utf-8"))
    for key in found:
        for text in TEXTS[key]:
            assert not re.search(r"[\"\\`<>&\n]|\$\{|\{\{", text), key
    assert found or name in ("say.js", "brand.js", "library_live.js")


@pytest.mark.parametrize("name", [name for name in MARKED_UP if name.endswith(".html")])
def test_templates_hold_no_text_of_their_own(name: str) -> None:
    text = re.sub(r"<!--.*?-->|<[^>]*>", "\n", (PAGES / name).read_text(encoding="utf-8"), flags=re.DOTALL)
    left = re.findall(r"[A-Za-z]{2,}.*", MARK.sub("", text))
    assert set(left) <= {"Coread"}


@pytest.mark.parametrize("name", [name for name in MARKED_UP if name.endswith(".js")])
def test_scripts_hold_no_text_of_their_own(name: str) -> None:
    lines = [line.split("//")[0] for line in (PAGES / name).read_text(encoding="utf-8").splitlines()]
    strings = re.findall(r"\"([^\"\n]*)\"|`([^`]*)`", MARK.sub("", "\n".join(lines)))
    for text in (first or second for first, second in strings):
        assert not re.search(r"[A-Z][a-z]+ [a-z]+ |[a-z]+ [a-z]+ [a-z]+", text), text


@pytest.mark.parametrize("name", TRANSLATED)
def test_handlers_hold_no_text_of_their_own(name: str) -> None:
    """A literal of two words and more in code that shows things is a text that went past the catalogue."""
    tree = ast.parse((PAGES / name).read_text(encoding="utf-8"))
    documented = {
        node.body[0].value.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
        and isinstance(node.body[0].value, ast.Constant)
    }
    documented |= {  # a line of the log is for whoever runs the server
        argument.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("log.")
        for argument in node.args
        if isinstance(argument, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value not in documented:
            shown = re.sub(r"\(.*?\)|=>.*|#cr-\S+", "", node.value) if "document." not in node.value else ""
            assert not re.search(r"\b[A-Za-z]{2,}[ ,]+[a-z]{2,}\b", shown), (
                f"{name}:{node.lineno} {node.value!r}"
            )


@pytest.fixture
async def page_client(runtime: Runtime) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_app(runtime, build_demo(runtime)), client=("127.0.0.1", 50_000))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:7860") as opened:
        yield opened


async def test_the_page_comes_in_the_language_that_was_asked_for(page_client: httpx.AsyncClient) -> None:
    html = {"accept": "text/html"}
    english = (await page_client.get("/", headers=html)).text
    assert "New conversation" in english
    assert '() => "en"' in english
    answer = await page_client.get("/", headers={**html, "accept-language": "zh-TW,zh;q=0.9"})
    assert answer.headers["content-language"] == "zh-Hant"
    assert "新對話" in answer.text
    assert "New conversation" not in answer.text
    assert not MARK.findall(answer.text), "a mark was left"
    assert 'lang="zh-Hant"' in answer.text
    assert '() => "zh-TW"' in answer.text
    assert len(answer.content) == int(answer.headers["content-length"])


async def test_the_switch_is_remembered_and_stays_here(page_client: httpx.AsyncClient) -> None:
    answer = await page_client.get("/memory?language=zh-Hant&x=1", headers={"accept": "text/html"})
    assert (answer.status_code, answer.headers["location"]) == (303, "/memory?x=1")
    assert f"{words.COOKIE}=zh-Hant; Path=/" in answer.headers["set-cookie"]
    page_client.cookies.set(words.COOKIE, "zh-Hant")
    assert "新對話" in (await page_client.get("/", headers={"accept": "text/html"})).text
    away = await page_client.get("//example.org/?language=en", headers={"accept": "text/html"})
    assert not away.headers.get("location", "").startswith("//")
    unknown = await page_client.get("/?language=xx", headers={"accept": "text/html"})
    assert unknown.status_code == 200


def test_texts_cannot_end_the_script_that_they_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words_page, "TEXTS", {"a.b": ('</script>"\\\n', "x")})
    assert words_page.translated('{"a": "@@a.b@@"}', "en") == r'{"a": "\u003c/script\u003e\"\\\n"}'
    assert words_page.translated("@@no.such@@", "en") == "@@no.such@@"


@pytest.mark.parametrize("key", sorted(TEXTS))
def test_every_text_is_used(key: str) -> None:
    """By its whole key, or by a prefix that code completes (`"receipt." + name`)."""
    prefix = key.rpartition(".")[0] + "."
    made = (f'"{prefix}"', f"'{prefix}'", f'f"{prefix}{{', f"f'{prefix}{{")
    used = any(f'"{key}"' in text or f"'{key}'" in text or f"@@{key}@@" in text for text in _sources())
    assert used or any(start in text for text in _sources() for start in made), key


@functools.cache
def _sources() -> tuple[str, ...]:
    app = PAGES.parent
    return tuple(
        path.read_text(encoding="utf-8")
        for path in sorted(app.rglob("*"))
        if path.suffix in (".py", ".js", ".html") and not path.name.startswith("words_")
    )
