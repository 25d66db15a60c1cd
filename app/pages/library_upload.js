// Files on their way: each is sent by a request of its own, two at a time, and followed until it is ready.
//
//     waiting ─▶ sending ─▶ queued ─▶ parsing ─▶ embedding ─▶ ready
//         └──────────┴──────────┴─────────┴───────────┴─────▶ failed (a reason; tried again) or cancelled

const uploads = [];
const AT_ONCE = 2;
let numbered = 0;
const ended = (upload) => ["ready", "failed", "cancelled"].includes(upload.stage);

// `into`: {collection} or {replaces: document id}.
function send(files, into) {
  for (const file of files) {
    uploads.push({ key: ++numbered, file, into, name: file.name, stage: "waiting", share: 0, id: "", problem: "" });
  }
  next();
  showUploads();
}
// `again`: whether the same file may be taken another time.
function fail(upload, problem, again) {
  upload.stage = "failed";
  upload.problem = problem;
  upload.again = again;
}

function next() {
  for (const upload of uploads) {
    if (uploads.filter((other) => other.stage === "sending").length >= AT_ONCE) break;
    if (upload.stage !== "waiting") continue;
    const limit = state.look.max_upload_bytes;
    if (upload.file.size > limit) fail(upload, say("@@library.too_large@@", { limit: limit / 2 ** 20 }), false);
    else if (!upload.file.size) fail(upload, "@@library.is_empty@@", false);
    else start(upload);
  }
}
function start(upload) {
  const { collection, replaces } = upload.into;
  const request = new XMLHttpRequest();
  const path = replaces ? `library/files/${encodeURIComponent(replaces)}` : "library/files";
  const url = new URL(path, ROOT);
  if (collection) url.searchParams.set("collection", collection);
  request.open("POST", url);
  request.responseType = "json";
  request.setRequestHeader("content-type", "application/octet-stream");
  request.setRequestHeader("x-coread-name", encodeURIComponent([...upload.name].slice(0, 255).join("")));
  request.upload.addEventListener("progress", (event) => {
    upload.share = event.lengthComputable ? event.loaded / event.total : upload.share;
    showUploads();
  });
  request.addEventListener("loadend", () => {
    upload.request = null;
    if (upload.stage === "sending") taken(upload, request);
    next();
    showUploads();
    poll();
  });
  upload.stage = "sending";
  upload.request = request;
  request.send(upload.file);
}
function taken(upload, request) {
  const answer = request.response;
  if (answer?.id) {
    dropUpload(answer.id); // a row of the version before
    upload.id = answer.id;
    upload.namesake = answer.namesake || "";
    upload.stage = "queued";
    return;
  }
  upload.existing = answer?.existing || "";
  const said = answer?.error;
  fail(upload, typeof said === "string" ? said : said?.message || "@@library.no_answer@@", true);
}

// What the server says of the documents that were sent from here.
function followUploads(documents) {
  for (const upload of uploads) {
    const found = upload.id && documents.find((one) => one.id === upload.id);
    if (!found || upload.stage === "cancelled") continue;
    if (found.status !== "ready" || !found.problem) {
      if (upload.stage !== "ready" && found.status === "ready") {
        put($("said"), say("@@library.said_ready@@", { name: upload.name, n: found.passages }));
      }
      upload.stage = found.status;
      upload.problem = found.problem;
      upload.again = found.retry;
    } else fail(upload, found.problem, found.retry); // the version before it is still there
    upload.share = found.progress;
    upload.passages = found.passages;
  }
  showUploads();
}
const underWay = () => uploads.some((upload) => !ended(upload));

async function cancelUpload(upload) {
  const { request } = upload;
  upload.stage = "cancelled";
  if (request) request.abort();
  else if (upload.id) {
    if (!(await ask("cancel", { id: upload.id }))) upload.stage = "queued";
  }
  showUploads();
  poll();
}
async function retryUpload(upload) {
  upload.problem = "";
  if (upload.id) {
    if (await ask("retry", { id: upload.id })) upload.stage = "queued";
  } else {
    upload.stage = "waiting";
    next();
  }
  showUploads();
  poll();
}
function dropUpload(id) {
  for (let at = uploads.length - 1; at >= 0; at--) if (uploads[at].id === id) uploads.splice(at, 1);
  showUploads();
}

const STAGES = {
  waiting: "@@library.stage.waiting@@", sending: "@@library.stage.sending@@", queued: "@@library.stage.queued@@",
  parsing: "@@library.stage.parsing@@", embedding: "@@library.stage.embedding@@", ready: "@@library.stage.ready@@",
  failed: "@@library.stage.failed@@", cancelled: "@@library.stage.cancelled@@",
};
function stageWords(stage, share) {
  const told = ["sending", "embedding"].includes(stage) && share > 0 && share < 1;
  return told ? `${STAGES[stage]} ${Math.round(100 * share)}%` : STAGES[stage];
}

function showUploads() {
  $("sending").hidden = !uploads.length;
  $("tidy").hidden = !uploads.some(ended);
  part("uploads", uploads.map(({ key, name, stage, share, problem, passages }) =>
    [key, name, stage, Math.round(100 * share), problem, passages]), () => uploads.map(uploadRow));
}
function uploadRow(upload) {
  const row = make("li", "", `cl-upload cl-is-${upload.stage}`);
  const words = make("div", "", "cl-grow");
  words.append(make("b", upload.name));
  let said = stageWords(upload.stage, upload.share);
  if (upload.stage === "ready") said = say("@@library.ready@@", { n: upload.passages || 0 });
  words.append(make("span", upload.problem || said, upload.stage === "failed" ? "cl-bad" : "cl-soft"));
  if (upload.stage === "ready" && upload.namesake) words.append(make("span", "@@library.namesake@@"));
  if (!ended(upload)) {
    const share = upload.stage === "sending" || (upload.stage === "embedding" && upload.share) ? upload.share : null;
    words.append(bar(share, said));
  }
  row.append(words);
  const act = (label, fn) => row.append(keyed(button(label, "cl-link", fn, `${label}: ${upload.name}`), `${label}${upload.key}`));
  if (!ended(upload)) act("@@library.cancel@@", () => cancelUpload(upload));
  else if (upload.existing) act("@@library.open_existing@@", () => goTo(upload.existing));
  else if (upload.stage === "cancelled" || (upload.stage === "failed" && upload.again)) act("@@library.retry@@", () => retryUpload(upload));
  else if (upload.stage === "ready") {
    if (upload.namesake) act("@@library.open_namesake@@", () => goTo(upload.namesake));
    act("@@library.open@@", () => goTo(upload.id));
    act("@@library.ask@@", () => askAbout(upload.id));
  }
  return row;
}

$("tidy").addEventListener("click", () => {
  for (let at = uploads.length - 1; at >= 0; at--) if (ended(uploads[at])) uploads.splice(at, 1);
  showUploads();
  showDocuments();
});
$("choose").addEventListener("click", () => $("files").click());
$("files").addEventListener("change", () => {
  send([...$("files").files], { collection: ownTarget() });
  $("files").value = "";
});
let versionOf = "";
function replaceDocument(id) {
  versionOf = id;
  $("version").click();
}
$("version").addEventListener("change", () => {
  send([...$("version").files].slice(0, 1), { replaces: versionOf });
  $("version").value = "";
  if (state.open) goTo("");
});
const carriesFiles = (event) => [...(event.dataTransfer?.types || [])].includes("Files");
let entered = 0;
for (const name of ["dragenter", "dragover", "dragleave", "drop"]) {
  document.addEventListener(name, (event) => {
    if (!element.isConnected || !carriesFiles(event) || !state.look) return;
    event.preventDefault();
    if (name === "dragenter") entered++;
    if (name === "dragleave") entered--;
    if (name === "drop") {
      entered = 0;
      send([...event.dataTransfer.files], { collection: ownTarget() });
    }
    $("drop").classList.toggle("cl-over", entered > 0);
  });
}
addEventListener("beforeunload", (event) => {
  if (element.isConnected && uploads.some(({ stage }) => ["waiting", "sending"].includes(stage))) event.preventDefault();
});
