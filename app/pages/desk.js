// The desk under the chat: what the links in messages do. Runs as the `js_on_load` of one gr.HTML whose
// template never changes. Documents reach the page as text nodes only, never as mark-up.
// `element`, `props`, `server`, `trigger` and `watch` are given by Gradio.

const $ = (name) => element.querySelector(`[data-cr="${name}"]`);
const sheet = $("sheet");

function put(name, text) {
  $(name).textContent = text || "";
  $(name).hidden = !text;
}

// Empties the sheet and opens it: a document's text or, with `submit`, a form.
function open(title, submit) {
  put("title", title);
  put("where", "");
  put("verdict", "");
  $("text").replaceChildren();
  $("text").hidden = Boolean(submit);
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

// Shows a document with one passage marked and scrolled to.
function showSource(source) {
  open(source.title, null);
  put("where", source.where);
  put("verdict", source.verdict);
  const mark = document.createElement("mark");
  mark.textContent = source.text;
  mark.dataset.cr = "mark";
  $("text").replaceChildren(source.before, mark, source.after);
  mark.scrollIntoView({ block: "center" });
}

function showError(sentence) {
  open("That did not work", null);
  put("where", sentence);
}

async function call(name, asked, done) {
  try {
    const answer = await server[name](asked);
    if (answer.error) showError(answer.error);
    else done(answer);
  } catch (error) {
    showError("No answer from the server; try again.");
  }
}

// The rating is stored at once; words may follow.
function rate(message, rating, label) {
  call("feedback", { message, rating }, () => {
    for (const other of ["good", "bad"]) {
      document.querySelector(`#cr-chat a[href="#cr-${other}-${message}"]`)
        ?.setAttribute("aria-current", String(other === rating));
    }
    ask("Thank you", `${label} (You may also just close this.)`, "", "Send", (comment) =>
      call("feedback", { message, rating, comment }, () => sheet.close()));
  });
}

const actions = {
  source: (message, number) => call("source", { message, number: Number(number) }, showSource),
  good: (message) => rate(message, "good", "What was good about it?"),
  bad: (message) => rate(message, "bad", "What was wrong with it?"),
  branch: (message) => trigger("branch", { message }),
  edit: (message) => call("question", { message }, ({ text }) =>
    ask("Edit the question", "It is asked beside the first one; both stay.", text, "Ask", (edited) => {
      sheet.close();
      trigger("edit", { message, text: edited });
    })),
};

function follow(event) {
  if (!element.isConnected) {
    document.removeEventListener("click", follow, true);
    return;
  }
  const link = event.target instanceof Element ? event.target.closest("#cr-chat a[href^='#cr-']") : null;
  if (!link) return;
  event.preventDefault();
  event.stopPropagation();
  const [, action, ...rest] = link.getAttribute("href").slice(1).split("-");
  if (Object.hasOwn(actions, action)) actions[action](...rest);
}

document.addEventListener("click", follow, true);
$("close").addEventListener("click", () => sheet.close());
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
