// The block map: one byte a block (25·state + 5·running readers + open readers), drawn as one image pixel a
// block and scaled up without smoothing; outlines and flashes lie on a second canvas above it.

// Where most of the pool is free the part in use is enlarged, and a strip below it is the whole pool.

const map = { cell: 1, columns: 1, rows: 1, ratio: 1, shown: 0, wanted: 0, whole: false, image: null, buffer: document.createElement("canvas") };
const FREE = 0, PINNED = 5;
const STATE_WORDS = "@@dash.states@@".split(",");

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

// How many blocks to draw, from the first one on: in steps, so that the picture does not swim.
function shownOf(cells) {
  const total = cells.length;
  let used = total;
  while (used > 0 && cells[used - 1] < 25) used--;
  let wanted = 512;
  while (wanted < used * 1.1) wanted *= 2;
  if (map.whole || wanted * 1.5 >= total) return total;
  return map.wanted > wanted && map.wanted <= 2 * wanted ? map.wanted : (map.wanted = wanted);
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
  map.shown = shownOf(cells);
  if (!layMap(map.shown)) return;
  map.shown = Math.min(total, map.columns * map.rows); // whole rows
  const table = lookup(), pixels = new Uint32Array(map.image.data.buffer);
  const readers = READERS[state.view];
  let shared = 0, named = 0;
  for (let block = 0; block < total; block++) {
    const code = cells[block], count = readers[code];
    if (block < map.shown) pixels[block] = table[code];
    if (count > 0) named++;
    if (count > 1) shared++;
  }
  pixels.fill(0, map.shown);
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
  drawStrip(cells, table);
  Object.assign(canvas.dataset, { total: String(total), shown: String(map.shown), shared: String(shared) });
  text("shared", number(shared));
  text("shared-note", say("@@dash.shared_note@@", { n: named }));
}

// The whole pool in one line: each column shows the block with most readers among those that it stands for.
function drawStrip(cells, table) {
  const part = map.shown < cells.length;
  $("strip-box").hidden = !part;
  $("zoom").hidden = !part && !map.whole;
  text("zoom", map.whole ? "@@dash.zoom_used@@" : "@@dash.zoom_whole@@");
  if (!part) return;
  const drawn = surface("strip", 14);
  if (!drawn) return;
  const { context, width } = drawn, readers = READERS[state.view];
  for (let x = 0; x < width; x++) {
    const end = Math.max(Math.floor((x * cells.length) / width) + 1, Math.floor(((x + 1) * cells.length) / width));
    let best = 0;
    for (let block = Math.floor((x * cells.length) / width); block < end; block++) {
      const code = cells[block];
      if (readers[code] > readers[best] || (best < 25 && code >= 25)) best = code;
    }
    const colour = table[best];
    context.fillStyle = `rgb(${colour & 255},${(colour >> 8) & 255},${(colour >> 16) & 255})`;
    context.fillRect(x, 0, 1, 10);
  }
  const edge = (width * map.shown) / cells.length;
  context.fillStyle = colours().css.ink;
  context.fillRect(0, 12, edge, 2);
  text("strip-note", say("@@dash.strip@@", { last: map.shown - 1, n: cells.length }));
}

// One outline round each stretch of this conversation's blocks that lies side by side.
function outline(context) {
  const { cell, columns } = map, mine = state.feed.mine_blocks;
  context.strokeStyle = colours().css.mine;
  context.lineWidth = Math.max(1, Math.round(cell / 8));
  const inset = context.lineWidth / 2;
  for (let i = 0; i < mine.length && mine[i] < map.shown;) {
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
    if (left <= 0 || block >= map.shown) {
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
  if (column < 0 || column >= map.columns || block < 0 || block >= map.shown || block === pointed) return;
  pointed = block;
  const code = state.cells[block], kind = Math.floor(code / 25);
  const known = say("@@dash.block@@", { block, state: STATE_WORDS[kind] });
  text("hover", kind === FREE ? known : `${known} · ${say("@@dash.readers@@", { n: readersOf(code) === 4 ? "@@dash.four@@" : readersOf(code) })}`);
  clearTimeout(asking);
  if (kind === FREE || live.replay) return;
  asking = setTimeout(async () => {
    const found = await server.block(block).catch(() => null);
    if (pointed !== block) return;
    if (!found) { pointed = -1; return; } // asked again when the pointer moves
    const parts = [known];
    parts.push(found.kind === "instructions" ? "@@dash.instructions@@" : found.kind === "branch" ? "@@dash.branch@@" : documentName(found.documents, found.hidden));
    if (found.page) parts.push(say("@@dash.page@@", { page: found.page }));
    if (found.section) parts.push(say("@@dash.section@@", { title: found.section }));
    if (found.known && found.first_token !== null) parts.push(say("@@dash.tokens@@", { first: found.first_token, last: found.first_token + found.filled - 1 }));
    parts.push(say("@@dash.readers_running@@", { readers: say("@@dash.readers@@", { n: found.open_readers }), n: found.readers }));
    if (found.copied_slots) {
      const slots = say("@@dash.slots_copied@@", { n: found.copied_slots });
      parts.push(found.copied_from === null ? slots : say("@@dash.slots_from@@", { slots, block: found.copied_from }));
    }
    if (state.feed.mine_blocks.includes(block)) parts.push("@@dash.this@@");
    text("hover", parts.join(" · "));
  }, 120);
}
