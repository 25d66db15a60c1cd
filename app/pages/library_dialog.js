// One dialog for everything that is asked before it is done. `body` are nodes; `yes` returns a sentence to
// show where it did not work, and nothing where it did.

let answered = null;
function dialog({ title, body, yes, label, danger }) {
  put($("dialog-title"), title);
  $("dialog-body").replaceChildren(...body);
  $("dialog-error").hidden = true;
  put($("dialog-no"), yes ? "@@library.no@@" : "@@library.close@@");
  $("dialog-yes").hidden = !yes;
  $("dialog-yes").disabled = false;
  put($("dialog-yes"), label || "@@library.ok@@");
  $("dialog-yes").classList.toggle("cl-danger", Boolean(danger));
  answered = yes;
  if (!$("dialog").open) $("dialog").showModal();
  ($("dialog-body").querySelector("input, select") || (danger ? $("dialog-no") : $("dialog-yes"))).focus();
}
function dialogProblem(sentence) {
  put($("dialog-error"), sentence);
  $("dialog-error").hidden = !sentence;
}
$("form").addEventListener("submit", async (event) => {
  event.preventDefault();
  if (!answered) return;
  $("dialog-yes").disabled = true;
  const problem = await answered();
  $("dialog-yes").disabled = false;
  if (problem) dialogProblem(problem);
  else $("dialog").close();
});
$("dialog-no").addEventListener("click", () => $("dialog").close());
$("dialog").addEventListener("click", (event) => { if (event.target === $("dialog")) $("dialog").close(); });

// As `ask`, but a refusal goes into the open dialog.
async function askIn(name, asked, done) {
  try {
    const answer = await server[name](asked);
    if (answer.error || answer.warming_up) return answer.error || answer.warming_up;
    await done?.(answer);
    poll();
    return "";
  } catch (error) {
    return "@@library.no_answer@@";
  }
}

function field(label, value, more) {
  const outer = make("label", "", "cl-field");
  const input = make("input");
  Object.assign(input, { value: value || "", required: true, maxLength: 80, autocomplete: "off" }, more);
  outer.append(make("span", label), input);
  return [outer, input];
}

function createCollection() {
  const [outer, input] = field("@@library.create_name@@");
  dialog({
    title: "@@library.create@@", label: "@@library.create_go@@",
    body: [make("p", state.look.me.can_name ? "@@library.create_why@@" : "@@library.create_why_open@@"), outer],
    yes: () => askIn("create", { name: input.value }, ({ id }) => choose(id)),
  });
}
function renameCollection(collection) {
  const [outer, input] = field("@@library.create_name@@", collection.name);
  dialog({
    title: "@@library.rename@@", label: "@@library.rename@@", body: [outer],
    yes: () => askIn("rename", { id: collection.id, name: input.value }),
  });
}

// Who reads a collection, for its owner.
function shareCollection(collection) {
  const { me } = state.look;
  const list = make("ul", "", "cl-people");
  const readers = (of) => {
    const rows = of.readers.map((reader) => {
      const row = make("li");
      row.append(make("span", reader.name), button("@@library.unshare@@", "cl-link", async () => {
        const problem = await askIn("share", { id: of.id, out: reader.id });
        dialogProblem(problem);
        if (!problem) readers({ ...of, readers: of.readers.filter((one) => one !== reader) });
      }, say("@@library.unshare_name@@", { name: reader.name })));
      return row;
    });
    list.replaceChildren(...(rows.length ? rows : [make("li", "@@library.readers_none@@", "cl-soft")]));
  };
  readers(collection);
  const body = [make("p", me.can_name ? "@@library.share_why@@" : "@@library.share_nobody@@")];
  let name = null;
  if (me.can_name) {
    const [outer, input] = field("@@library.share_name@@", "", { maxLength: 60 });
    name = input;
    body.push(list, outer);
  }
  if (me.can_open || collection.everybody) {
    const outer = make("label", "", "cl-check"), box = make("input");
    Object.assign(box, { type: "checkbox", checked: collection.everybody });
    box.addEventListener("change", async () => {
      const problem = await askIn("share", { id: collection.id, everybody: box.checked });
      dialogProblem(problem);
      if (problem) box.checked = !box.checked;
    });
    outer.append(box, make("span", "@@library.everybody@@"));
    body.push(outer);
  } else if (me.can_name) body.push(make("p", "@@library.everybody_admin@@", "cl-soft"));
  dialog({
    title: say("@@library.share_title@@", { name: collection.name }), label: "@@library.share_go@@", body,
    yes: name && (() => askIn("share", { id: collection.id, name: name.value }, async () => {
      tell(say("@@library.shared@@", { name: name.value.trim(), collection: collection.name }));
    })),
  });
}
function leaveCollection(collection) {
  dialog({
    title: say("@@library.leave_title@@", { name: collection.name }), label: "@@library.leave@@", danger: true,
    body: [make("p", "@@library.leave_why@@")],
    yes: () => askIn("leave", { id: collection.id }, () => choose("")),
  });
}

// Says what goes before it goes, and what was freed once it is gone.
function frees(weight) {
  const list = make("ul", "", "cl-frees");
  if (weight.documents > 1) list.append(make("li", say("@@library.frees_documents@@", { n: weight.documents })));
  list.append(make("li", say("@@library.frees_passages@@", { n: weight.passages })));
  list.append(make("li", weight.file_bytes ? say("@@library.frees_file@@", { size: bytes(weight.file_bytes) })
    : "@@library.frees_no_file@@"));
  list.append(make("li", weight.blocks ? say("@@library.frees_blocks@@",
    { n: weight.blocks, size: bytes(weight.block_bytes) }) : "@@library.frees_no_blocks@@"));
  if (weight.held) list.append(make("li", say("@@library.frees_held@@", { n: weight.held })));
  return list;
}
function freed(name, weight) {
  const blocks = say("@@library.freed_blocks@@", { n: weight.blocks, size: bytes(weight.block_bytes) });
  tell(say("@@library.freed@@", { name, n: weight.passages, file: bytes(weight.file_bytes), blocks }) + (weight.held ? ` ${say("@@library.freed_held@@", { n: weight.held })}` : ""));
}
async function deleteDocument(shown) {
  const weight = await ask("weight", { id: shown.id });
  if (!weight) return;
  dialog({
    title: say("@@library.delete_title@@", { name: shown.title }), label: "@@library.delete@@", danger: true,
    body: [make("p", "@@library.delete_why@@"), frees(weight), make("p", "@@library.delete_cites@@", "cl-soft")],
    yes: () => askIn("delete", { id: shown.id }, (answer) => {
      freed(shown.title, answer);
      dropUpload(shown.id);
      if (state.open === shown.id) goTo("");
    }),
  });
}
async function deleteCollection(collection) {
  const weight = await ask("weight", { collection: collection.id });
  if (!weight) return;
  dialog({
    title: say("@@library.delete_title@@", { name: collection.name }), label: "@@library.delete@@", danger: true,
    body: [make("p", "@@library.delete_collection_why@@"), frees(weight)],
    yes: () => askIn("delete", { collection: collection.id }, (answer) => {
      freed(collection.name, answer);
      choose("");
    }),
  });
}
