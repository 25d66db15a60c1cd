// The desk under the chat: what the links in messages do. Runs as the `js_on_load` of one gr.HTML whose
// template never changes. Documents reach the page as text nodes only, never as mark-up.
// `element`, `props`, `server`, `trigger` and `watch` are given by Gradio.

const $ = (name) => element.querySelector(`[data-cr="${name}"]`);
const sheet = $("sheet");

function put(name, text) {
  $(name).textContent = text || "";
  $(name).hidden = !text;
}

// Shows a document with one passage marked and scrolled to.
function showSource(source) {
  put("title", source.title);
  put("where", source.where);
  put("verdict", source.verdict);
  const mark = document.createElement("mark");
  mark.textContent = source.text;
  mark.dataset.cr = "mark";
  $("text").replaceChildren(source.before, mark, source.after);
  if (!sheet.open) sheet.showModal();
  mark.scrollIntoView({ block: "center" });
}

function showError(sentence) {
  put("title", "That did not work");
  put("where", sentence);
  put("verdict", "");
  $("text").replaceChildren();
  if (!sheet.open) sheet.showModal();
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

const actions = {
  source: (message, number) => call("source", { message, number: Number(number) }, showSource),
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
