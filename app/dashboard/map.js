// The block map: one byte a block (25·state + 5·running readers + open readers), drawn as one image pixel a
// block and scaled up without smoothing; outlines and flashes lie on a second canvas above it.

const map = { cell: 1, columns: 1, rows: 1, ratio: 1, image: null, buffer: document.createElement("canvas") };
const FREE = 0, PINNED = 5;
const STATE_WORDS = ["free", "being written by one reader", "held and shareable", "kept for reuse", "an open tail, kept for reuse", "pinned"];

const READERS = { running: new Uint8Array(256), open: new Uint8Array(256) };
for (let code = 0; code < 150; code++) {
  READERS.running[code] = Math.floor(code / 5) % 5;
  READERS.open[code] = code % 5;
}
const readersOf = (code) => READERS[state.view][code];

function lookup() {
  const c = colours();
  const table = new Uint32Array(256);
  const pack = ([r, g, b]) => ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;
  for (let code = 0; code < 150; code++) {
    const kind = Math.floor(code / 25), readers = readersOf(code);
    table[code] = pack(readers > 0 ? c.readers[readers - 1] : kind === FREE ? c.free : kind === PINNED ? c.pinned : c.retained);
  }
  return table;
}

function layMap(total) {
  const canvas = $("map"), width = canvas.parentElement.clientWidth;
  if (!width || !total) return false;
  const ratio = window.devicePixelRatio || 1;
  const wide = Math.round(width * ratio);
  const high = Math.round(Math.min(420, Math.max(220, width * 0.46)) * ratio);
  const cell = Math.max(1, Math.min(Math.round(22 * ratio), Math.floor(Math.sqrt((wide * high) / total))));
  const columns = Math.max(1, Math.floor(wide / cell)), rows = Math.ceil(total / columns);
  if (map.cell !== cell || map.columns !== columns || map.rows !== rows || !map.image) {
    Object.assign(map, { cell, columns, rows, ratio });
    map.buffer.width = columns;
    map.buffer.height = rows;
    map.image = map.buffer.getContext("2d").createImageData(columns, rows);
    for (const name of ["map", "flash"]) {
      const layer = $(name);
      layer.width = columns * cell;
      layer.height = rows * cell;
      layer.style.width = `${(columns * cell) / ratio}px`;
      layer.style.height = `${(rows * cell) / ratio}px`;
    }
  }
  return true;
}

function drawMap() {
  const cells = state.cells, total = cells.length;
  if (!layMap(total)) return;
  const table = lookup(), pixels = new Uint32Array(map.image.data.buffer);
  const readers = READERS[state.view];
  let shared = 0, named = 0;
  for (let block = 0; block < total; block++) {
    const code = cells[block], count = readers[code];
    pixels[block] = table[code];
    if (count > 0) named++;
    if (count > 1) shared++;
  }
  pixels.fill(0, total);
  map.buffer.getContext("2d").putImageData(map.image, 0, 0);
  const canvas = $("map"), context = canvas.getContext("2d");
  context.imageSmoothingEnabled = false;
  context.clearRect(0, 0, canvas.width, canvas.height);
  context.drawImage(map.buffer, 0, 0, canvas.width, canvas.height);
  const { cell, columns, rows } = map;
  if (cell >= 4) {
    const gap = Math.max(1, Math.round(cell / 9));
    context.fillStyle = colours().css.card;
    for (let column = 1; column <= columns; column++) context.fillRect(column * cell - gap, 0, gap, canvas.height);
    for (let row = 1; row <= rows; row++) context.fillRect(0, row * cell - gap, canvas.width, gap);
  }
  outline(context);
  Object.assign(canvas.dataset, { total: String(total), shared: String(shared) });
  text("shared", number(shared));
  text("shared-note", `of ${number(named)} that somebody reads`);
}

// One outline round each stretch of this conversation's blocks that lies side by side.
function outline(context) {
  const { cell, columns } = map, mine = state.feed.mine_blocks;
  context.strokeStyle = colours().css.mine;
  context.lineWidth = Math.max(1, Math.round(cell / 8));
  const inset = context.lineWidth / 2;
  for (let i = 0; i < mine.length;) {
    let j = i + 1;
    while (j < mine.length && mine[j] === mine[j - 1] + 1 && mine[j] % columns !== 0) j++;
    const x = (mine[i] % columns) * cell, y = Math.floor(mine[i] / columns) * cell;
    const gap = cell >= 4 ? Math.max(1, Math.round(cell / 9)) : 0;
    context.strokeRect(x + inset, y + inset, (j - i) * cell - gap - 2 * inset, cell - gap - 2 * inset);
    i = j;
  }
}

// Flashes fade within a second; with reduced motion they stand still until the next update.
const flashing = new Map();
let fading = 0;
function flash(events, seen) {
  const now = performance.now();
  if (calm.matches) flashing.clear();
  for (const kind of ["published", "copied"]) {
    for (const [event, block] of events[kind] || []) if (event > seen) flashing.set(block, [kind, now]);
  }
  if (!fading) fade();
}
function fade() {
  fading = 0;
  const canvas = $("flash"), context = canvas.getContext("2d"), now = performance.now();
  const { cell, columns } = map, c = colours().css;
  context.clearRect(0, 0, canvas.width, canvas.height);
  for (const [block, [kind, since]] of flashing) {
    const left = calm.matches ? 1 : 1 - (now - since) / 1000;
    if (left <= 0) {
      flashing.delete(block);
      continue;
    }
    const x = (block % columns) * cell, y = Math.floor(block / columns) * cell;
    context.globalAlpha = left;
    if (kind === "copied" || cell < 5) {
      context.fillStyle = kind === "copied" ? c.mine : c.ink;
      context.fillRect(x, y, cell, cell);
    } else {
      context.strokeStyle = c.ink;
      context.lineWidth = Math.max(1.5, cell / 7);
      context.strokeRect(x + 1, y + 1, cell - 3, cell - 3);
    }
  }
  context.globalAlpha = 1;
  if (flashing.size && !calm.matches) fading = requestAnimationFrame(fade);
}

// The pointer asks the server, which tells names only to those who may read them.
let pointed = -1, asking = 0;
function pointAt(event) {
  const box = $("map").getBoundingClientRect();
  const column = Math.floor(((event.clientX - box.left) * map.ratio) / map.cell);
  const block = Math.floor(((event.clientY - box.top) * map.ratio) / map.cell) * map.columns + column;
  if (column < 0 || column >= map.columns || block < 0 || block >= state.cells.length || block === pointed) return;
  pointed = block;
  const code = state.cells[block], kind = Math.floor(code / 25);
  const known = `Block ${number(block)}: ${STATE_WORDS[kind]}`;
  text("hover", kind === FREE ? known : `${known} · ${readersOf(code) === 4 ? "4 or more" : readersOf(code)} readers`);
  clearTimeout(asking);
  if (kind === FREE || live.replay) return;
  asking = setTimeout(async () => {
    const found = await server.block(block).catch(() => null);
    if (!found || pointed !== block) return;
    const parts = [known];
    parts.push(found.kind === "instructions" ? "instructions" : found.kind === "branch" ? "a reader’s own text" : found.documents);
    if (found.first_token !== null) parts.push(`tokens ${number(found.first_token)} to ${number(found.first_token + found.filled - 1)} of its chain`);
    parts.push(`${number(found.readers)} running and ${number(found.open_readers)} open readers`);
    if (found.copied_slots) parts.push(`${plural(found.copied_slots, "slot")} copied${found.copied_from === null ? "" : ` from block ${number(found.copied_from)}`}`);
    if (state.feed.mine_blocks.includes(block)) parts.push("this conversation");
    text("hover", parts.join(" · "));
  }, 120);
}
