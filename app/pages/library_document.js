// A document's page: what it is, its versions, its sections; and what its owner does with it.

function goTo(id) {
  state.open = id;
  state.page = null;
  state.texts.clear();
  const hash = id ? `#document=${encodeURIComponent(id)}` : "";
  if (location.hash !== hash) history.pushState(null, "", location.pathname + location.search + hash);
  showPlace();
  if (id) openPage(true);
}
function fromHash() {
  const match = /^#document=(.+)$/.exec(location.hash);
  let id = "";
  try {
    id = match ? decodeURIComponent(match[1]) : "";
  } catch (error) {
    id = ""; // a made-up address
  }
  if (id !== state.open) goTo(id);
}
function showPlace() {
  $("shelf").hidden = Boolean(state.open);
  $("page").hidden = !state.open;
}

async function openPage(first) {
  const id = state.open;
  let answer = null;
  try {
    answer = await server.document({ id, version: state.page?.document.version });
  } catch (error) {
    return; // `poll` says that the server does not answer
  }
  if (state.open !== id) return;
  if (answer.error) {
    tell(answer.error, true);
    goTo("");
    return;
  }
  if (answer.warming_up) return;
  answer.sections ??= state.page?.sections || []; // the same as before
  state.page = answer;
  showPage();
  if (first) $("page-title").focus();
}

function showPage() {
  const { document: one, collection, versions, sections, may_keep, pool } = state.page;
  put($("page-title"), one.title);
  put($("page-name"), say("@@library.in_collection@@", { name: one.name, collection: collection.name }));
  put($("page-problem"), one.problem && one.version ? say("@@library.new_version_failed@@", { why: one.problem }) : one.problem);
  $("page-problem").hidden = !one.problem;
  const busy = ["queued", "parsing", "embedding"].includes(one.status);
  part("page-tools", [one.id, one.status, one.own, one.problem, one.version, may_keep, one.memory.kept], () => {
    const tools = [];
    const tool = (key, label, act, more) => tools.push(keyed(button(label, `cl-button ${more || ""}`, act), key));
    if (one.version) {
      tool("ask", "@@library.ask_document@@", () => askAbout(one.id), "cl-go");
      const link = make("a", "@@library.download@@", "cl-button");
      link.href = new URL(`library/files/${encodeURIComponent(one.id)}`, ROOT);
      link.download = "";
      tools.push(keyed(link, "download"));
    }
    if (may_keep && one.version) tool("pin", one.memory.kept ? "@@library.unpin@@" : "@@library.pin@@", () => pinDocument(one));
    if (one.own) {
      if (one.retry) tool("retry", "@@library.retry@@", () => ask("retry", { id: one.id }).then(() => openPage()));
      if (busy) tool("cancel", "@@library.cancel@@", () => ask("cancel", { id: one.id }).then(() => openPage()));
      else if (one.version) tool("replace", "@@library.replace@@", () => replaceDocument(one.id));
      if (!busy) tool("delete", "@@library.delete@@", () => deleteDocument(one), "cl-quiet");
    }
    return tools;
  });
  part("page-facts", [one, versions.length], () => [
    ["@@library.fact_state@@", busy ? stageWords(one.status, one.progress) : STAGES[one.status]],
    ["@@library.fact_size@@", one.size ? bytes(one.size) : "–"],
    ["@@library.fact_passages@@", one.version ? number(one.passages) : "–"],
    ["@@library.fact_characters@@", one.version ? number(one.characters) : "–"],
    ...(one.pages ? [["@@library.fact_pages@@", number(one.pages)]] : []),
    ["@@library.fact_memory@@", one.version ? heatWords(one.memory) : "–"],
    ...(one.memory.blocks ? [["@@library.fact_blocks@@", say("@@library.blocks@@", { n: one.memory.blocks, size: bytes(one.memory.blocks * pool.block_bytes) })]] : []),
  ].map(([label, value]) => {
    const pair = make("div");
    pair.append(make("dt", label), make("dd", value));
    return pair;
  }));
  put($("page-pin"), !one.version ? "" : may_keep ? say("@@library.pin_why@@", { n: pool.pinned, limit: pool.pin_limit }) : "@@library.pin_who@@");
  $("page-versions-box").hidden = versions.length < 2;
  part("page-versions", versions, () => versions.map((version, at) => {
    const row = make("li");
    row.append(make("b", say("@@library.version@@", { version: version.version })), make("span", at ? "" : "@@library.version_now@@", "cl-tag"),
      make("span", `${version.name} · ${bytes(version.size)} · ${say("@@library.passages@@", { n: version.passages })} · ${when(version.ready)}`, "cl-soft"));
    return row;
  }));
  put($("page-sections-title"), one.version ? say("@@library.sections@@", { n: sections.length }) : "");
  part("page-sections", [one.id, one.version, sections], () => sections.map(sectionRow));
}
function sectionRow(section) {
  const details = make("details", "", "cl-section");
  const summary = make("summary");
  const where = [say("@@library.characters@@", { n: section.characters })];
  if (section.page) where.unshift(say("@@library.page@@", { page: section.page }));
  details.style.setProperty("--cl-level", String(Math.min(4, Math.max(0, section.level - 1))));
  const path = section.title.split(" › "); // the indent says what it stands under
  summary.append(make("b", path[path.length - 1] || "@@library.untitled_section@@"), make("span", where.join(" · "), "cl-soft"));
  const text = make("div", "", "cl-text");
  text.tabIndex = 0;
  details.append(keyed(summary, `section ${section.index}`), text);
  details.addEventListener("toggle", async () => {
    if (!details.open || text.textContent) return;
    const id = state.open;
    text.textContent = "@@library.loading@@";
    const answer = await ask("section", { id, index: section.index });
    text.textContent = answer ? answer.text + (answer.cut ? "\n…" : "") : "";
    if (!answer) details.open = false;
  });
  return details;
}
async function pinDocument(one) {
  const answer = await ask("pin", { id: one.id, kept: !one.memory.kept });
  if (answer) {
    tell(one.memory.kept ? say("@@library.unpinned@@", { name: one.title })
      : answer.blocks ? say("@@library.pinned_now@@", { name: one.title, n: answer.blocks }) : say("@@library.pinned_later@@", { name: one.title }));
  }
  openPage();
}
$("back").addEventListener("click", () => {
  goTo("");
  $("title").focus();
});
addEventListener("popstate", () => { if (element.isConnected) fromHash(); });
