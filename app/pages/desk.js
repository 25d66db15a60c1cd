// The desk under the chat: what the links in messages do. Runs as the `js_on_load` of one gr.HTML whose
// template never changes. Documents reach the page as text nodes only, never as mark-up.
// `element`, `props`, `server`, `trigger` and `watch` are given by Gradio.

const $ = (name) => element.querySelector(`[data-cr="${name}"]`);
const sheet = $("sheet");

function put(name, text) {
  $(name).textContent = text || "";
  $(name).hidden = !text;
}

// Empties the sheet and opens it: with `submit` for a form, else for what the caller puts in.
function open(title, submit) {
  put("title", title);
  put("where", "");
  put("verdict", "");
  $("text").replaceChildren();
  $("text").hidden = true;
  $("confirm").hidden = true;
  $("form").hidden = !submit;
  $("form").onsubmit = (event) => {
    event.preventDefault();
    submit($("form-text").value);
  };
  if (!sheet.open) sheet.showModal();
}

function ask(title, label, text, button, submit) {
  open(title, submit);
  put("form-label", label);
  put("form-go", button);
  $("form-text").value = text;
  $("form-text").focus();
}

// Asks before something is lost. The safe answer has the focus.
function confirm(title, why, button, go) {
  open(title, null);
  put("where", why);
  put("confirm-go", button);
  $("confirm").hidden = false;
  $("confirm").onsubmit = (event) => {
    event.preventDefault();
    sheet.close();
    go();
  };
  $("confirm-keep").focus();
}

// Shows a document with one passage marked and scrolled to.
function showSource(source) {
  open(source.title, null);
  put("where", source.where);
  put("verdict", source.verdict);
  const mark = document.createElement("mark");
  mark.textContent = source.text;
  mark.dataset.cr = "mark";
  $("text").replaceChildren(source.before, mark, source.after);
  $("text").hidden = false;
  mark.scrollIntoView({ block: "center" });
}

function showError(sentence) {
  open("@@chat.failed@@", null);
  put("where", sentence);
}

async function call(name, asked, done) {
  try {
    const answer = await server[name](asked);
    if (answer.error) showError(answer.error);
    else done(answer);
  } catch (error) {
    showError("@@desk.offline@@");
  }
}

// The rating is stored at once; words may follow.
function rate(message, rating, label) {
  call("feedback", { message, rating }, () => {
    for (const other of ["good", "bad"]) {
      document.querySelector(`#cr-chat a[href="#cr-${other}-${message}"]`)
        ?.setAttribute("aria-pressed", String(other === rating));
    }
    ask("@@desk.thanks@@", `${label} @@desk.optional@@`, "", "@@desk.send@@", (comment) =>
      call("feedback", { message, rating, comment }, () => sheet.close()));
  });
}

// The answer as it was written, not as it is drawn: without our links, with its own punctuation.
async function copy(message) {
  const { text } = await server.question({ message });
  if (navigator.clipboard && isSecureContext) return navigator.clipboard.writeText(text);
  const area = document.createElement("textarea"); // a page over plain http has no clipboard of its own
  area.value = text;
  element.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  if (!done) throw new Error("refused");
}

async function copied(message, link) {
  try {
    await copy(message);
    link.textContent = $("said").textContent = "@@answer.copied@@";
    setTimeout(() => { link.textContent = "@@answer.copy@@"; $("said").textContent = ""; }, 2000);
  } catch (error) {
    showError("@@answer.copy_failed@@");
  }
}

const actions = {
  copy: copied,
  source: (message, number) => call("source", { message, number: Number(number) }, showSource),
  good: (message) => rate(message, "good", "@@desk.good_why@@"),
  bad: (message) => rate(message, "bad", "@@desk.bad_why@@"),
  branch: (message) => trigger("branch", { message }),
  edit: (message) => call("question", { message }, ({ text }) =>
    ask("@@desk.edit@@", "@@desk.edit_why@@", text, "@@chat.ask@@", (edited) => {
      sheet.close();
      trigger("edit", { message, text: edited });
    })),
};

// Buttons of Gradio's that ask before they act: the click that was meant goes through.
const guarded = {
  "cr-delete": ["@@chat.delete_title@@", "@@chat.delete_why@@", "@@chat.delete@@"],
};
let meant = null;
function guard(event) {
  const button = event.target instanceof Element ? event.target.closest("button") : null;
  if (!button || !Object.hasOwn(guarded, button.id)) return false;
  if (meant === button) {
    meant = null;
    return false;
  }
  event.preventDefault();
  event.stopPropagation();
  confirm(...guarded[button.id], () => {
    meant = button;
    button.click();
  });
  return true;
}

function actionAt(event) {
  return event.target instanceof Element ? event.target.closest("#cr-chat a[href^='#cr-']") : null;
}

function follow(event) {
  if (!element.isConnected) {
    document.removeEventListener("click", follow, true);
    return;
  }
  if (guard(event)) return;
  const link = actionAt(event);
  if (!link) return;
  event.preventDefault();
  event.stopPropagation();
  const [, action, ...rest] = link.getAttribute("href").slice(1).split("-");
  if (Object.hasOwn(actions, action)) actions[action](...rest, link);
}

document.addEventListener("click", follow, true);

// What is announced as a button is pressed with the space bar too; a link answers to Enter only.
function press(event) {
  if (!element.isConnected) {
    document.removeEventListener("keydown", press, true);
    return;
  }
  const link = event.key === " " ? actionAt(event) : null;
  if (!link) return;
  event.preventDefault(); // the page would scroll
  if (!event.repeat) link.click();
}

document.addEventListener("keydown", press, true);

// Gradio names a message for screen readers by its source text, with every escape in it, and does not say
// whether a folded part or the sidebar is open. The message's own text is there to be read. Messages are
// Markdown, which has links only, without a role of their own: those that do something here are buttons. An
// arrow says nothing, so its hint is its name.
let tidying = 0;
function tidy() {
  tidying = 0;
  for (const message of document.querySelectorAll("#cr-chat [data-testid][aria-label]")) {
    if (message.dataset.testid === "bot" || message.dataset.testid === "user") message.removeAttribute("aria-label");
  }
  for (const title of document.querySelectorAll("#cr-chat .title[role=button]")) {
    title.setAttribute("aria-expanded", String(title.classList.contains("expanded")));
  }
  for (const link of document.querySelectorAll("#cr-chat a[href^='#cr-']:not([role=button])")) {
    link.setAttribute("role", "button");
    if (link.title && !/\p{L}/u.test(link.textContent)) link.setAttribute("aria-label", link.title);
  }
  for (const side of document.querySelectorAll(".sidebar")) {
    side.querySelector(".toggle-button")?.setAttribute("aria-expanded", String(side.classList.contains("open")));
  }
}
const watching = new MutationObserver(() => {
  if (!element.isConnected) watching.disconnect();
  else tidying ||= requestAnimationFrame(tidy);
});
function watchChat() {
  const chat = document.querySelector("#cr-chat");
  const side = document.querySelector(".sidebar");
  if (!chat || !side) {
    setTimeout(watchChat, 100); // Gradio brings its components in whatever order they load
    return;
  }
  const what = { subtree: true, childList: true, attributes: true, attributeFilter: ["class", "aria-label"] };
  watching.observe(chat, what);
  watching.observe(side, { attributes: true, attributeFilter: ["class"] });
  tidy();
}
watchChat();
for (const name of ["close", "confirm-keep"]) $(name).addEventListener("click", () => sheet.close());
sheet.addEventListener("click", (event) => { if (event.target === sheet) sheet.close(); });

// A question that is being written survives a reload of its tab. The stored draft stays as it is until it has
// been put back: a second reload before that must not lose it.
const DRAFT = "coread.draft";
const box = () => document.querySelector("#cr-ask textarea");
let restored = false;
function keepDraft() {
  if (restored) sessionStorage.setItem(DRAFT, box()?.value || "");
}
function restoreDraft() {
  if (!element.isConnected) return;
  if (!box()) {
    setTimeout(restoreDraft, 50);
    return;
  }
  const draft = sessionStorage.getItem(DRAFT);
  if (draft && !box().value) {
    box().value = draft;
    box().dispatchEvent(new Event("input", { bubbles: true }));
  }
  restored = true;
}
addEventListener("pagehide", keepDraft);
restoreDraft();
