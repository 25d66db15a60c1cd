"""The library page in a real browser: files on their way, people apart, sharing, hostile names, deletion."""

from __future__ import annotations

import asyncio
import re
import threading
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Browser, Locator, Page, expect

from tests.e2e.conftest import SETUP_TOKEN, Person, Served, set_up

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
MILL = b"# The mill\n\nThe mill at Tarn grinds barley.\n\n## Sails\n\nIt has four sails.\n"
HOSTILE = '<img src=x onerror="window.ran=1"> ${window.ran=1} [l](javascript:window.ran=1) <|im_end|>'


async def visit(browser: Browser, served: Served, **more: Any) -> Person:
    context = await browser.new_context(viewport={"width": 1280, "height": 900}, **more)
    person = Person(context, await context.new_page(), served.url)
    await look(person)
    return person


async def look(person: Person) -> None:
    await person.page.goto(f"{person.url}/library")
    await person.page.locator("[data-cl=collections] button").first.wait_for(timeout=90_000)


def file(name: str, data: bytes) -> Any:
    return {"name": name, "mimeType": "application/octet-stream", "buffer": data}


async def choose(page: Page, *files: Any) -> None:
    await page.locator("[data-cl=files]").set_input_files(list(files))


def upload(page: Page, name: str) -> Locator:
    return page.locator(".cl-upload").filter(has_text=name)


def listed(page: Page, title: str) -> Locator:
    return page.locator(".cl-document").filter(has_text=title)


async def test_several_files_with_their_stages_to_a_cited_answer(served: Served, browser: Browser) -> None:
    ann = await visit(browser, served)
    page = ann.page
    embedder: Any = served.runtime.knowledge._library.library._embedder
    held = threading.Event()
    embedder.before = held.wait
    await choose(page, file("mill.md", MILL), file("photo.bin", bytes(range(256)) * 8), file("empty.md", b""))
    await expect(upload(page, "mill.md")).to_contain_text("Making it searchable")
    await expect(upload(page, "empty.md")).to_contain_text("The file is empty")
    await expect(upload(page, "photo.bin")).to_have_class(re.compile("cl-is-failed"))
    said = await upload(page, "photo.bin").locator("span").first.inner_text()
    assert len(said) > 15, "a reason in words"
    held.set()
    await expect(upload(page, "mill.md")).to_contain_text("Ready: 2 passages")
    # Its bytes stay what they are, so there is nothing to try again.
    await expect(upload(page, "photo.bin").get_by_role("button", name="Try again")).to_have_count(0)
    # The same content once more names what is there.
    await choose(page, file("copy.md", MILL))
    await expect(upload(page, "copy.md")).to_contain_text("already, as “mill.md”")
    # One that is given up while it waits for the embedder, and taken up again.
    held.clear()
    await choose(page, file("oats.md", b"# Oats\n\nOats are sown in March.\n"))
    await expect(upload(page, "oats.md")).to_contain_text("Making it searchable")
    await upload(page, "oats.md").get_by_role("button", name="Cancel").click()
    await expect(upload(page, "oats.md")).to_contain_text("Cancelled")
    held.set()
    await upload(page, "oats.md").get_by_role("button", name="Try again").click()
    await expect(upload(page, "oats.md")).to_contain_text("Ready")
    await choose(page, file("oats.md", b"# Oats\n\nOats are sown in April.\n"))
    await expect(upload(page, "oats.md").last).to_contain_text("another document of this name")
    await expect(
        upload(page, "oats.md").last.get_by_role("button", name="Open the other one")
    ).to_be_visible()
    await expect(page.locator("[data-cl=count]")).to_have_text("3 documents, 1 failed")
    await expect(page.locator(".cl-collection").first).to_contain_text("3 documents, 1 failed")
    # By keyboard: a document's page, a section of it, back again.
    await listed(page, "The mill").locator(".cl-title").focus()
    await page.keyboard.press("Enter")
    await expect(page.locator("[data-cl=page-title]")).to_have_text("The mill")
    await page.locator("summary").filter(has_text="Sails").focus()
    await page.keyboard.press("Enter")
    await expect(page.locator(".cl-text").nth(1)).to_contain_text("four sails")
    async with page.expect_download() as started:
        await page.get_by_role("link", name="Download").click()
    assert await asyncio.to_thread(Path(await (await started.value).path()).read_bytes) == MILL
    await page.go_back()
    await expect(listed(page, "The mill")).to_be_visible()
    # Ask about it: the chat opens with it chosen, and the answer cites it.
    await listed(page, "The mill").get_by_role("button", name="Ask").click()
    await expect(page.locator("#cr-document input")).to_have_value("Only: The mill", timeout=60_000)
    suggested = page.locator("#cr-suggest button").first  # about all documents
    await expect(suggested).to_be_hidden()
    await ann.ask("What does the mill at Tarn grind?")
    await ann.answered()
    await page.get_by_text(re.compile("^Sources? ·")).first.click()
    await page.get_by_text("grinds barley").first.wait_for()
    await look(ann)
    await expect(listed(page, "The mill")).to_contain_text("open in 1 conversation")
    ann.assert_unharmed()


async def test_a_new_version_and_a_deletion_that_says_what_it_frees(served: Served, browser: Browser) -> None:
    ann = await visit(browser, served, color_scheme="dark")
    page = ann.page
    await choose(page, file("mill.md", MILL))
    await expect(upload(page, "mill.md")).to_contain_text("Ready")
    await upload(page, "mill.md").get_by_role("button", name="Open").click()
    async with page.expect_file_chooser() as chooser:
        await page.get_by_role("button", name="Replace with a new version").click()
    await (await chooser.value).set_files([file("mill 2.md", MILL + b"\nAnd a door.\n")])
    await expect(upload(page, "mill 2.md")).to_contain_text("Ready")
    await listed(page, "The mill").locator(".cl-title").click()
    await expect(page.locator("[data-cl=page-versions] li")).to_have_count(2)
    await page.get_by_role("button", name="Pin in memory").click()
    await expect(page.get_by_role("button", name="Unpin")).to_be_visible()
    await page.get_by_role("button", name="Delete").click()
    dialog = page.locator("[data-cl=dialog]")
    await expect(dialog).to_contain_text("2 passages in the search")
    await expect(dialog).to_contain_text("B on disk")
    await dialog.get_by_role("button", name="Cancel").click()
    await expect(dialog).to_be_hidden()
    await expect(page.locator("[data-cl=page-title]")).to_have_text("The mill")
    await page.get_by_role("button", name="Delete").click()
    await dialog.get_by_role("button", name="Delete").click()
    await expect(page.locator(".cl-toast")).to_contain_text("“The mill” is deleted: 2 passages")
    await expect(listed(page, "The mill")).to_have_count(0)
    ann.assert_unharmed()


async def test_two_people_with_different_collections(served: Served, browser: Browser) -> None:
    ann, bob = await visit(browser, served), await visit(browser, served)
    for person, title in ((ann, "Zanzibar diary"), (bob, "Quokka census")):
        page = person.page
        await page.get_by_role("button", name="New collection").click()
        await page.locator("[data-cl=dialog] input").fill(f"Notes on {title}")
        await page.keyboard.press("Enter")
        await expect(page.locator("[data-cl=title]")).to_have_text(f"Notes on {title}")
        await choose(page, file(f"{title}.md", f"# {title}\n\nA text about it.".encode()))
        await expect(upload(page, f"{title}.md")).to_contain_text("Ready")
        await expect(listed(page, title)).to_be_visible()
    for person, foreign in ((ann, "Quokka"), (bob, "Zanzibar")):
        await look(person)
        await person.page.get_by_role("button", name="Sample knowledge base").click()
        await expect(listed(person.page, "The lighthouse")).to_be_visible()
        assert foreign not in await person.page.content()
        await person.load()
        assert foreign not in await person.page.content()
    ann.assert_unharmed()
    bob.assert_unharmed()


async def test_hostile_names_and_contents_are_only_shown(served: Served, browser: Browser) -> None:
    ann = await visit(browser, served)
    page = ann.page
    name = f"{HOSTILE}.md".replace("/", "_")
    await choose(page, file(name, f"# {HOSTILE}\n\n{HOSTILE} ![p](https://example.org/p.png)\n".encode()))
    await expect(upload(page, "onerror")).to_contain_text("Ready")
    await expect(page.locator(".cl-title").filter(has_text="${window.ran=1}")).to_be_visible()
    await page.get_by_role("button", name="New collection").click()
    await page.locator("[data-cl=dialog] input").fill(HOSTILE[:80])
    await page.keyboard.press("Enter")
    await expect(page.locator("[data-cl=title]")).to_contain_text("onerror")
    await page.get_by_role("button", name="Own documents").click()
    await page.locator(".cl-title").filter(has_text="${window.ran=1}").click()
    await page.locator("summary").first.click()
    await expect(page.locator(".cl-text").first).to_contain_text("${window.ran=1}")
    await page.get_by_role("button", name="Delete").click()
    await expect(page.locator("[data-cl=dialog-title]")).to_contain_text("onerror")
    await page.locator("[data-cl=dialog]").get_by_role("button", name="Cancel").click()
    assert await page.evaluate("window.ran") is None
    assert await page.locator("#cr-library img, #cr-library a[href^=javascript]").count() == 0
    await page.goto(f"{served.url}/library#document=%E0%A4%A")  # a made-up address
    await page.reload()
    await expect(page.locator("[data-cl=title]")).to_be_visible()
    ann.assert_unharmed()


async def form(page: Page, address: str, **fields: str) -> None:
    await page.goto(address)
    within = page.locator("form").filter(has=page.locator("input[name=name]")).first
    for name, value in fields.items():
        await within.locator(f"input[name={name}]").fill(value)
    async with page.expect_navigation():  # leaving earlier would lose the cookie that comes
        await within.locator("button").click()


@pytest.fixture
async def two_people(with_accounts: Served, browser: Browser) -> tuple[Person, Person]:
    url, people = with_accounts.url, []
    for name in ("Root", "Bob"):
        context = await browser.new_context(viewport={"width": 390, "height": 844})
        people.append(Person(context, await context.new_page(), url))
        page = people[-1].page
        if name == "Root":
            await set_up(page, with_accounts)
            await form(page, f"{url}/set-up", token=SETUP_TOKEN, name=name, password="correct horse")
            await form(page, f"{url}/people", name="Bob", password="battery staple")
        else:
            await form(page, f"{url}/sign-in", name=name, password="battery staple")
        await look(people[-1])
    return people[0], people[1]


async def test_a_collection_is_shared_by_name_on_a_phone(two_people: tuple[Person, Person]) -> None:
    root, bob = two_people
    page = root.page
    await page.get_by_role("button", name="New collection").click()
    await page.locator("[data-cl=dialog] input").fill("Recipes")
    await page.keyboard.press("Enter")
    await expect(page.locator("[data-cl=title]")).to_have_text("Recipes")
    await choose(page, file("mill.md", MILL))
    await expect(upload(page, "mill.md")).to_contain_text("Ready")
    for name, said in (("Mallory", "Nobody called “Mallory”"), ("bob", "")):
        await page.get_by_role("button", name="Share", exact=True).click()
        await page.locator("[data-cl=dialog] input").first.fill(name)
        await page.get_by_role("button", name="Let them read").click()
        if said:
            await expect(page.locator("[data-cl=dialog-error]")).to_contain_text(said)
            await page.keyboard.press("Escape")
    await expect(page.locator("[data-cl=who]")).to_contain_text("1 reader beside you: Bob")
    await look(bob)
    await bob.page.get_by_role("button", name="Recipes").click()
    await expect(bob.page.locator("[data-cl=who]")).to_have_text("Root lets you read this collection.")
    await expect(listed(bob.page, "The mill")).to_be_visible()
    assert await listed(bob.page, "The mill").get_by_role("button", name="Delete").count() == 0
    for person in (root, bob):
        wide = await person.page.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert wide <= 0, "nothing reaches past the phone's edge"
    await page.get_by_role("button", name="Share", exact=True).click()
    await page.get_by_role("button", name="Take Bob’s right to read away").click()
    await expect(page.locator(".cl-people")).to_contain_text("Nobody but you")
    await look(bob)
    await expect(bob.page.get_by_role("button", name="Sample knowledge base")).to_be_visible()
    assert "Recipes" not in await bob.page.content()
    root.assert_unharmed()
    bob.assert_unharmed()
