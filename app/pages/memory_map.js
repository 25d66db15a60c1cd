// The memory panel: follows the memory page's feed (feed.js, which stands before this) and draws the real pool.
// Runs as the `js_on_load` of one gr.HTML whose template never changes; data reaches the page through canvas and
// textContent only. `element`, `props`, `trigger` and `watch` are given by Gradio.

const $ = (name) => element.querySelector(`[data-cr="${name}"]`);
const canvas = $("map");
const MINUS = "–";
let view = "open";
let announced = "";
let feed = null;
const follow = follower();
let delay = 1000;
let timer = 0;
let waiting = 0;
const KEPT = "coread.conversation"; // of this tab: what a reload puts back on screen
let restore = sessionStorage.getItem(KEPT) || "";
let grid = { cell: 1, columns: 1, ratio: 1 }; // as last drawn, for the pointer

function bytes(count) {
  if (count === null || count === undefined) return MINUS;
  for (const unit of ["B", "KiB", "MiB"]) {
    if (Math.abs(count) < 1024) return `${count.toFixed(unit === "B" ? 0 : 1)} ${unit}`;
    count /= 1024;
  }
  return `${count.toFixed(1)} GiB`;
}
const number = (count) => Number(count).toLocaleString("en");
const saves = (saved, paged) => (paged > 0 ? say("@@panel.of_paged@@", { size: bytes(saved), share: Math.round((100 * saved) / paged) }) : MINUS);
// A block is one byte: 25·state + 5·running readers + open readers, four standing for four or more.
const stateOf = (code) => Math.floor(code / 25);
const nowOf = (code) => Math.floor(code / 5) % 5;
const openOf = (code) => code % 5;
const text = (name, value) => {
  const node = $(name);
  if (node && node.textContent !== value) node.textContent = value;
};

function colours() {
  const style = getComputedStyle(element.querySelector(".cr-memory"));
  const rgb = (name) => {
    const hex = style.getPropertyValue(name).trim().replace("#", "");
    return [0, 2, 4].map((i) => parseInt(hex.slice(i, i + 2), 16));
  };
  return {
    free: rgb("--cr-free"), retained: rgb("--cr-retained"), pinned: rgb("--cr-pinned"),
    readers: ["--cr-r1", "--cr-r2", "--cr-r3", "--cr-r4"].map(rgb), mine: style.getPropertyValue("--cr-mine").trim(),
    gap: rgb("--cr-gap"),
  };
}

function draw() {
  if (!feed || !feed.pool || !canvas.clientWidth) return;
  const { cells } = feed, readersOf = view === "running" ? nowOf : openOf;
  const total = cells.length;
  const ratio = window.devicePixelRatio || 1;
  const width = Math.round(canvas.clientWidth * ratio);
  // The largest square cell with which the whole pool fits the panel.
  const room = width * Math.round(Math.min(260, canvas.clientWidth) * ratio);
  const cell = Math.max(1, Math.min(Math.round(16 * ratio), Math.floor(Math.sqrt(room / total))));
  const columns = Math.max(1, Math.floor(width / cell));
  const rows = Math.ceil(total / columns);
  grid = { cell, columns, ratio };
  canvas.width = width;
  canvas.height = rows * cell;
  canvas.style.height = `${(rows * cell) / ratio}px`;
  const c = colours();
  const context = canvas.getContext("2d");
  const image = context.createImageData(width, rows * cell);
  const pixels = new Uint32Array(image.data.buffer);
  const pack = ([r, g, b]) => (255 << 24) | (b << 16) | (g << 8) | r;
  const gap = cell >= 4 ? Math.max(1, Math.round(cell / 8)) : 0;
  for (let block = 0; block < total; block++) {
    const n = readersOf(cells[block]), kind = stateOf(cells[block]);
    const colour = n > 0 ? c.readers[n - 1] : kind === 0 ? c.free : kind === 5 ? c.pinned : c.retained;
    const value = pack(colour);
    const x = (block % columns) * cell, y = Math.floor(block / columns) * cell;
    for (let dy = 0; dy < cell - gap; dy++) pixels.fill(value, (y + dy) * width + x, (y + dy) * width + x + cell - gap);
  }
  context.putImageData(image, 0, 0);
  if (cell >= 4) {
    context.strokeStyle = c.mine;
    context.lineWidth = Math.max(1, Math.round(cell / 7));
    const inset = context.lineWidth / 2;
    for (const block of feed.mine_blocks) {
      context.strokeRect((block % columns) * cell + inset, Math.floor(block / columns) * cell + inset,
        cell - gap - 2 * inset, cell - gap - 2 * inset);
    }
  }
  const shared = cells.reduce((sum, code) => sum + (readersOf(code) >= 2), 0);
  canvas.dataset.shared = String(shared);
  canvas.dataset.total = String(total);
  text("shared", number(shared));
}

function bars(prefix, reserved, paged, physical) {
  const most = Math.max(reserved, 1);
  for (const [name, value] of [["reserved", reserved], ["paged", paged], ["physical", physical]]) {
    const bar = $(`${prefix}-${name}-bar`);
    bar.style.inlineSize = `${Math.max(value > 0 ? 0.6 : 0, (100 * value) / most)}%`;
    text(`${prefix}-${name}`, bytes(value));
  }
}

// Gradio mounts its components one by one, as their code arrives, and may lose what the server sends to one just
// while it mounts: the Stop button of an answer found again after a reload, for one.
function mounted() {
  if (["#cr-ask textarea", "#cr-chat", "#cr-document input"].every((part) => document.querySelector(part))) return true;
  clearTimeout(waiting);
  waiting = setTimeout(() => { if (element.isConnected) show(); }, 50);
  return false;
}

function show() {
  const { pool, since_start: since, engine } = feed;
  const ready = engine.state === "ready" && pool !== undefined;
  $("warming").hidden = ready;
  text("warming", say(engine.state === "failed" ? "@@panel.failed@@" : "@@panel.detail@@", { detail: engine.detail }));
  $("body").hidden = !ready;
  if (!ready) return;
  const { mine, everybody } = feed[view];
  const stage = engine.seeding ? "seeding" : "seeded";
  if (announced !== stage && mounted()) {
    announced = stage;
    // The page fills its lists, and again once the sample documents have been read.
    const read = sessionStorage.getItem("coread.read") || ""; // what the library was left to ask about
    sessionStorage.removeItem("coread.read");
    trigger("ready", { conversation: restore, read });
    restore = "";
    canvas.dataset.asked = stage; // for tests
  }
  $("seeding").hidden = !engine.seeding;
  text("seeding", say("@@panel.seeding@@", { detail: engine.detail }));
  bars("mine", mine ? mine.reserved_bytes : 0, mine ? mine.unshared_bytes : 0, mine ? mine.fair_share_bytes : 0);
  bars("all", everybody.reserved_bytes, everybody.unshared_bytes, everybody.physical_bytes);
  text("mine-saved", mine ? saves(mine.saved_bytes, mine.unshared_bytes) : MINUS);
  text("all-share", saves(everybody.saved_bytes, everybody.unshared_bytes));
  text("all-saved", bytes(everybody.saved_bytes));
  text("readers", number(everybody.conversations));
  const none = view === "running" ? "@@panel.none_running@@" : "@@panel.none_open@@";
  text("mine-note", mine ? say("@@panel.blocks@@", { n: mine.blocks, shared: mine.shared_blocks }) : none);
  const skipped = since.prompt_tokens ? since.prefill_tokens_skipped / since.prompt_tokens : 0;
  text("since-skipped", `${number(since.prefill_tokens_skipped)} (${Math.round(100 * skipped)}%)`);
  text("since-peak", bytes(since.peak_saved_bytes));
  text("since-copied", number(since.blocks_copied));
  text("since-requests", number(since.requests));
  text("since-unread", bytes(since.kv_bytes_logical - since.kv_bytes_read));
  text("since-time", `${(since.saved_byte_seconds / 2 ** 30).toFixed(2)} GiB·s`);
  text("pool", say("@@panel.pool_is@@", { n: pool.total_blocks, size: pool.block_size, bytes: bytes(pool.block_bytes) }));
  text("engine", say("@@panel.engine_is@@", engine));
  draw();
  text("twin", say(view === "running" ? "@@panel.twin_running@@" : "@@panel.twin_open@@", {
    total: pool.total_blocks, free: pool.free, held: pool.held, retained: pool.retained, pinned: pool.pinned,
    readers: everybody.conversations, shared: $("shared").textContent, size: bytes(everybody.saved_bytes),
  }));
}

async function poll() {
  clearTimeout(timer);
  if (!element.isConnected) return;
  if (document.hidden) { timer = setTimeout(poll, 1000); return; }
  try {
    const update = await askFeed(follow.have, typeof props.value === "string" ? props.value : "", "g");
    delay = 1000;
    $("offline").hidden = true;
    if (update) {
      feed = await follow.take(update);
      show();
    }
  } catch (error) {
    delay = Math.min(delay * 2, 15000);
    $("offline").hidden = false;
  }
  timer = setTimeout(poll, delay);
}

for (const button of element.querySelectorAll("[data-view]")) {
  button.addEventListener("click", () => {
    view = button.dataset.view;
    for (const other of element.querySelectorAll("[data-view]")) {
      other.setAttribute("aria-pressed", String(other === button));
    }
    if (feed) show();
  });
}
canvas.addEventListener("mousemove", (event) => {
  if (!feed || !feed.pool) return;
  const rect = canvas.getBoundingClientRect();
  const column = Math.floor(((event.clientX - rect.left) * grid.ratio) / grid.cell);
  const block = Math.floor(((event.clientY - rect.top) * grid.ratio) / grid.cell) * grid.columns + column;
  if (column < 0 || column >= grid.columns || block < 0 || block >= Number(canvas.dataset.total)) return;
  const code = feed.cells[block], many = (n) => (n === 4 ? "@@panel.four@@" : n);
  const state = "@@panel.states@@".split(",")[stateOf(code)];
  const own = feed.mine_blocks.includes(block) ? " · @@panel.yours@@" : "";
  canvas.title = say("@@panel.block@@", { block, state, running: many(nowOf(code)), n: many(openOf(code)) }) + own;
});
new ResizeObserver(draw).observe(canvas.parentElement);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
new MutationObserver(draw).observe(document.body, { attributes: true, attributeFilter: ["class"] });
watch("value", () => {
  sessionStorage.setItem(KEPT, typeof props.value === "string" ? props.value : "");
  poll();
});
poll();
