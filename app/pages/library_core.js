// The library page's script, in the order say, core, dialog, upload, list, document, live (joined by
// library_page.py into the `js_on_load` of one gr.HTML whose template never changes). Names and texts of
// documents reach the page as text nodes only. `element` and `server` are given by Gradio.

const $ = (name) => element.querySelector(`[data-cl="${name}"]`);
const state = { look: null, collection: "", filter: "", open: "", page: null, texts: new Map() };

// Where Coread lies: the page itself is at `library` under it.
const ROOT = location.origin + location.pathname.replace(/library\/?$/, "");

const number = (count) => Number(count).toLocaleString("en");
function bytes(count) {
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (count < 1024) return `${count.toFixed(unit === "B" ? 0 : 1)} ${unit}`;
    count /= 1024;
  }
  return `${count.toFixed(1)} TiB`;
}
const when = (seconds) => new Date(seconds * 1000).toLocaleString(document.documentElement.lang || "en",
  { dateStyle: "medium", timeStyle: "short" });

function put(node, value) {
  if (node.textContent !== value) node.textContent = value;
}
function make(tag, value, className) {
  const node = document.createElement(tag);
  if (value) node.textContent = value;
  if (className) node.className = className;
  return node;
}
function button(label, className, act, name) {
  const made = make("button", label, className);
  made.type = "button";
  if (name) made.setAttribute("aria-label", name);
  made.addEventListener("click", act);
  return made;
}
// A bar from 0 to 1, or one that only says that something is going on.
function bar(share, label) {
  const outer = make("div", "", "cl-bar");
  outer.setAttribute("role", "progressbar");
  outer.setAttribute("aria-label", label);
  if (share === null) outer.classList.add("cl-busy");
  else {
    outer.setAttribute("aria-valuenow", String(Math.round(100 * share)));
    outer.setAttribute("aria-valuemin", "0");
    outer.setAttribute("aria-valuemax", "100");
  }
  const inner = make("i");
  if (share !== null) inner.style.inlineSize = `${Math.round(100 * share)}%`;
  outer.append(inner);
  return outer;
}

// Builds a part of the page anew only where what it would say has changed, and gives the focus back to the
// control that had it: somebody who works with the keyboard must not lose their place to an update.
const shown = new Map();
function part(name, said, build) {
  const key = JSON.stringify(said);
  if (shown.get(name) === key) return;
  shown.set(name, key);
  const box = $(name), held = box.contains(document.activeElement) ? document.activeElement.dataset.key : null;
  box.replaceChildren(...build());
  if (held) box.querySelector(`[data-key="${CSS.escape(held)}"]`)?.focus();
}
function keyed(node, key) {
  node.dataset.key = key;
  return node;
}

// What happened, for everybody: read out, and shown for a while beside the list.
let toast = 0;
function tell(sentence, bad) {
  let box = document.querySelector(".cl-toast");
  if (!box || !element.contains(box)) {
    box = make("div", "", "cl-toast");
    element.querySelector(".cr-lib").append(box);
  }
  box.classList.toggle("cl-bad", Boolean(bad));
  put(box, sentence);
  put($("said"), sentence);
  box.hidden = false;
  clearTimeout(toast);
  toast = setTimeout(() => (box.hidden = true), bad ? 12000 : 7000);
}

// Asks the server; tells a refusal and returns null.
async function ask(name, asked) {
  try {
    const answer = await server[name](asked);
    if (answer.error || answer.warming_up) {
      tell(answer.error || answer.warming_up, true);
      return null;
    }
    return answer;
  } catch (error) {
    tell("@@library.no_answer@@", true);
    return null;
  }
}
