// The collections, and the documents of the chosen one.

const chosen = () => state.look.collections.find((one) => one.id === state.look.chosen) || null;
const owned = () => state.look.collections.filter((one) => one.own);
// Where dropped files go: the chosen collection where it is one's own, else one's first; "" makes that.
const ownTarget = () => (chosen()?.own ? chosen().id : owned()[0]?.id || "");

function choose(id) {
  state.collection = id;
  state.filter = $("filter").value = "";
  goTo("");
  poll();
}
// Ask about a document or a collection: the chat opens with it chosen.
function askAbout(id) {
  sessionStorage.setItem("coread.read", id);
  location.href = ROOT;
}

function readersWords(collection) {
  if (collection.everybody) return "@@library.read_by_all@@";
  if (!collection.own) return collection.owner ? say("@@library.shared_by@@", { name: collection.owner }) : "@@library.shared_with_you@@";
  const n = collection.readers.length;
  return n ? say("@@library.read_by@@", { n, names: collection.readers.slice(0, 3).map(({ name }) => name).join(", ") }) : "@@library.read_by_you@@";
}

const documentsWords = (all, failed) => {
  const documents = say("@@library.documents@@", { n: all - failed });
  return failed ? say("@@library.documents_failed@@", { documents, n: failed }) : documents;
};

function showCollections() {
  const { collections, chosen: current } = state.look;
  part("collections", [collections.map(({ id, name, documents, failed, own, everybody, readers }) =>
    [id, name, documents, failed, own, everybody, readers.length]), current], () => collections.map((one) => {
    const row = make("li");
    const made = keyed(button("", "cl-collection", () => choose(one.id)), one.id);
    made.setAttribute("aria-current", String(one.id === current));
    made.append(make("b", one.name), make("span", documentsWords(one.documents, one.failed)),
      make("span", one.own ? (one.readers.length || one.everybody ? "@@library.tag_shared@@" : "@@library.tag_yours@@") : "@@library.tag_reading@@", "cl-tag"));
    row.append(made);
    return row;
  }));
}

function showUsage() {
  const { usage } = state.look;
  part("usage", usage, () => {
    const meter = (label, used, most, words) => {
      const box = make("div", "", "cl-meter");
      box.append(make("span", label), make("b", words), bar(Math.min(1, used / most), `${label}: ${words}`));
      return box;
    };
    const of = (used, most) => say("@@library.of@@", { used, most });
    const out = [
      make("h3", "@@library.usage@@"),
      meter("@@library.usage_documents@@", usage.documents, usage.max_documents, 
        of(number(usage.documents), number(usage.max_documents)) + (usage.failed ? ` ${say("@@library.usage_failed@@", { n: usage.failed })}` : "")),
      meter("@@library.usage_bytes@@", usage.bytes, usage.max_bytes, of(bytes(usage.bytes), bytes(usage.max_bytes))),
    ];
    if (usage.max_uploads_per_hour) {
      const used = usage.max_uploads_per_hour - usage.uploads_left;
      out.push(meter("@@library.usage_hour@@", used, usage.max_uploads_per_hour, of(number(used), number(usage.max_uploads_per_hour))));
    }
    return out;
  });
}

function showHead() {
  const collection = chosen(), { me, may_keep, warming } = state.look;
  put($("title"), collection ? collection.name : "@@library.empty_title@@");
  put($("who"), collection ? readersWords(collection) : "");
  put($("kinds"), say("@@library.kinds@@", { limit: state.look.max_upload_bytes / 2 ** 20 })
    + (collection && !collection.own ? ` ${owned().length ? say("@@library.goes_to@@", { name: owned()[0].name }) : "@@library.goes_to_new@@"}` : ""));
  const busy = Boolean(warming && ["reading", "waiting"].includes(warming.state));
  part("tools", [collection, may_keep, busy], () => {
    if (!collection) return [];
    const tools = [];
    const tool = (key, label, act, className) => tools.push(keyed(button(label, `cl-button ${className || ""}`, act), key));
    if (collection.documents > collection.failed) tool("ask", "@@library.ask_collection@@", () => askAbout(`collection:${collection.id}`), "cl-go");
    if (collection.own) {
      tool("share", "@@library.share@@", () => shareCollection(collection));
      tool("rename", "@@library.rename@@", () => renameCollection(collection));
    }
    if (may_keep && collection.documents > collection.failed && !busy) tool("warm", "@@library.warm@@", () => warmCollection(collection));
    if (collection.own) tool("delete", "@@library.delete@@", () => deleteCollection(collection), "cl-quiet");
    if (!collection.own && !collection.everybody) tool("leave", "@@library.leave@@", () => leaveCollection(collection), "cl-quiet");
    return tools;
  });
}

function warmCollection(collection) {
  dialog({
    title: say("@@library.warm_title@@", { name: collection.name }), label: "@@library.warm_go@@",
    body: [make("p", "@@library.warm_why@@"), make("p", "@@library.warm_yields@@", "cl-soft")],
    yes: () => askIn("warm", { id: collection.id }),
  });
}
const WARM = {
  reading: "@@library.warm.reading@@", waiting: "@@library.warm.waiting@@", done: "@@library.warm.done@@",
  full: "@@library.warm.full@@", stopped: "@@library.warm.stopped@@", failed: "@@library.warm.failed@@",
};
function showWarming() {
  const { warming } = state.look;
  const here = warming && warming.collection === state.look.chosen && state.dismissed !== warmKey(warming);
  $("warm").hidden = !here;
  part("warm", here ? warming : null, () => {
    if (!here) return [];
    const { state: stage, done, total, tokens, found, skipped, problem } = warming;
    const words = make("div", "", "cl-grow");
    words.append(make("b", WARM[stage]));
    let said = say("@@library.warm_parts@@", { n: total, done, tokens });
    if (found) said += ` ${say("@@library.warm_found@@", { n: found })}`;
    if (skipped) said += ` ${say("@@library.warm_skipped@@", { n: skipped })}`;
    words.append(make("span", problem || said, problem ? "cl-bad" : "cl-soft"), bar(total ? done / total : null, said));
    const running = ["reading", "waiting"].includes(stage);
    const stop = keyed(button(running ? "@@library.stop@@" : "@@library.close@@", "cl-link", () => {
      if (running) ask("warm", { id: warming.collection, stop: true }).then(poll);
      else {
        state.dismissed = warmKey(warming);
        showWarming();
      }
    }), "stop");
    return [words, stop];
  });
}
const warmKey = ({ collection, done, total, state: stage }) => `${collection} ${done} ${total} ${stage}`;

function heatWords({ blocks, running, open, kept }) {
  const said = [];
  if (open) said.push(say("@@library.heat_open@@", { n: open }));
  if (running) said.push(say("@@library.heat_now@@", { n: running }));
  if (!open && blocks) said.push("@@library.heat_kept@@");
  if (!blocks) said.push("@@library.heat_cold@@");
  if (kept) said.push("@@library.pinned@@");
  return said.join(" · ");
}
// Readers as up to four marks, beside the words: the eye finds what is read much.
function heat(memory) {
  const box = make("span", "", "cl-heat");
  const marks = make("i", "", "cl-marks");
  marks.dataset.readers = String(Math.min(4, memory.open));
  marks.dataset.held = String(memory.blocks > 0);
  marks.setAttribute("aria-hidden", "true");
  box.append(marks, make("span", heatWords(memory)));
  return box;
}

function documentRow(one) {
  const row = make("li", "", `cl-document cl-is-${one.status}`);
  const words = make("div", "", "cl-grow");
  const title = keyed(button(one.title, "cl-title", () => goTo(one.id)), `open ${one.id}`);
  const facts = [];
  if (one.title !== one.name) facts.push(one.name);
  if (one.size) facts.push(bytes(one.size));
  if (one.version) facts.push(say("@@library.passages@@", { n: one.passages }));
  facts.push(say("@@library.added@@", { when: when(one.created) }));
  if (one.version > 1) facts.push(say("@@library.version@@", { version: one.version }));
  words.append(title, make("span", facts.join(" · "), "cl-soft"));
  const busy = ["queued", "parsing", "embedding"].includes(one.status);
  if (busy) words.append(make("span", stageWords(one.status, one.progress)), bar(one.status === "embedding" ? one.progress : null, one.title));
  if (one.problem) words.append(make("span", one.version ? say("@@library.new_version_failed@@", { why: one.problem }) : one.problem, "cl-bad"));
  row.append(words);
  if (one.version) row.append(heat(one.memory));
  const acts = make("div", "", "cl-acts");
  const act = (key, label, fn, more) => acts.append(keyed(button(label, `cl-link ${more || ""}`, fn, `${label}: ${one.title}`), `${key} ${one.id}`));
  if (one.version) act("ask", "@@library.ask@@", () => askAbout(one.id));
  if (one.own && busy) act("cancel", "@@library.cancel@@", () => ask("cancel", { id: one.id }).then(poll));
  if (one.own && one.retry) act("retry", "@@library.retry@@", () => ask("retry", { id: one.id }).then(poll));
  if (one.own && !busy) act("delete", "@@library.delete@@", () => deleteDocument(one), "cl-quiet");
  row.append(acts);
  return row;
}
function showDocuments() {
  const { documents, more, total, failed, pool, others, me } = state.look, collection = chosen();
  $("filter").hidden = !(total > 5 || state.filter);
  // What is on its way, or did not arrive, stands above with its stage; here it would be said twice.
  const above = new Set(uploads.filter(({ id }) => id).map(({ id }) => id));
  const rows = documents.filter((one) => one.version || !above.has(one.id));
  put($("count"), collection ? documentsWords(total || 0, failed || 0) : "");
  part("documents", rows, () => rows.map(documentRow));
  const empty = !documents.length;
  $("empty").hidden = !empty;
  part("empty", [empty, Boolean(collection), collection?.own, state.filter], () => {
    if (!empty) return [];
    if (state.filter) return [make("p", say("@@library.none_found@@", { filter: state.filter }))];
    if (collection && !collection.own) return [make("p", "@@library.empty_shared@@")];
    const steps = make("ol");
    steps.append(make("li", "@@library.teach_1@@"), make("li", "@@library.teach_2@@"), make("li", "@@library.teach_3@@"));
    return [make("h3", collection ? "@@library.empty_collection@@" : "@@library.empty_library@@"), steps];
  });
  $("more").hidden = !more;
  put($("more"), say("@@library.more@@", { n: more }));
  const memory = [say("@@library.pinned_of@@", { n: pool.pinned, limit: pool.pin_limit, size: bytes(pool.block_bytes * pool.pinned) })];
  if (others.blocks) memory.push(say("@@library.others@@", { n: others.blocks, readers: say("@@library.heat_open@@", { n: others.open }) }));
  if (me.anonymous) memory.push("@@library.visitors@@");
  put($("memory"), memory.join(" "));
}
