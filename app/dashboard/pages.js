// A page table: the logical blocks of each branch above, the physical blocks they map to below, ribbons
// between them. Blocks that several readers share are joined by colour; the copied one is marked.

function runsOf(blocks) {
  const runs = [];
  blocks.forEach((block, i) => {
    const last = runs[runs.length - 1];
    if (last && block === last.block + last.length) last.length++;
    else runs.push({ at: i, block, length: 1 });
  });
  return runs;
}

function drawPages() {
  const tables = state.pages || [];
  const drawn = surface("pages", tables.length ? 136 + 34 * tables.length : 24);
  if (!drawn) return;
  const { context, width } = drawn, c = colours().css;
  if (!tables.length) {
    text("pages-title", "");
    text("pages-note", "@@dash.pages_none@@");
    text("pages-twin", "");
    return;
  }
  const physical = [...new Set(tables.flatMap((t) => t.blocks))].sort((a, b) => a - b);
  const gaps = physical.reduce((sum, block, i) => sum + (i > 0 && block !== physical[i - 1] + 1), 0);
  const longest = Math.max(...tables.map((t) => t.blocks.length));
  const gap = Math.min(18, Math.max(4, width / 60));
  const cell = Math.min(26, (width - 2) / longest, (width - 2 - gaps * gap) / physical.length);
  const square = Math.max(2, Math.min(20, cell)), tall = Math.max(12, square);
  const place = new Map();
  let x = 0;
  physical.forEach((block, i) => {
    if (i > 0) x += cell + (block !== physical[i - 1] + 1 ? gap : 0);
    place.set(block, x);
  });
  const bottom = drawn.height - 56, colourOf = new Map();
  const readers = new Map(), copied = new Map(), filled = new Map();
  for (const t of tables) t.blocks.forEach((b, i) => {
    readers.set(b, t.readers[i]);
    filled.set(b, t.filled[i]);
    if (t.copied[i]) copied.set(b, t.copied[i]);
  });
  for (const block of physical) colourOf.set(block, readerColour(readers.get(block), false));
  context.fillStyle = c.soft;
  context.fillText("@@dash.logical@@", 0, 12);
  context.fillText("@@dash.physical@@", 0, bottom + tall + 29);
  tables.forEach((table, row) => {
    const y = 20 + row * 34;
    for (const run of runsOf(table.blocks)) {
      // A run may change colour inside: one ribbon for each stretch of equal readers.
      for (let i = 0; i < run.length;) {
        let j = i + 1;
        while (j < run.length && colourOf.get(run.block + j) === colourOf.get(run.block + i)) j++;
        const from = (run.at + i) * cell, to = place.get(run.block + i), span = (j - i - 1) * cell + square;
        const middle = (y + tall + bottom) / 2;
        context.globalAlpha = 0.34;
        context.fillStyle = colourOf.get(run.block + i);
        context.beginPath();
        context.moveTo(from, y + tall);
        context.bezierCurveTo(from, middle, to, middle, to, bottom);
        context.lineTo(to + span, bottom);
        context.bezierCurveTo(to + span, middle, from + span, middle, from + span, y + tall);
        context.fill();
        context.globalAlpha = 1;
        i = j;
      }
    }
    table.blocks.forEach((block, i) => drawBlock(context, i * cell, y, cell, square, block));
  });
  physical.forEach((block) => drawBlock(context, place.get(block), bottom, cell, square, block));
  context.fillStyle = c.soft;
  let labelled = -100;
  physical.forEach((block, i) => {
    const at = place.get(block);
    if ((i === 0 || block !== physical[i - 1] + 1) && at - labelled > 44) {
      context.fillText(number(block), Math.min(at, width - context.measureText(number(block)).width), bottom + tall + 13);
      labelled = at;
    }
  });

  function drawBlock(context, x, y, cell, square, block) {
    const size = Math.max(1, square - (cell > 5 ? 2 : 0));
    context.fillStyle = colourOf.get(block);
    context.fillRect(x, y, size, tall);
    const empty = 1 - filled.get(block) / state.feed.pool.block_size;
    if (empty > 0) {
      context.fillStyle = c.free;
      context.fillRect(x + size * (1 - empty), y + 1, size * empty, tall - 2);
    }
    if (copied.has(block)) {
      context.strokeStyle = c.mine;
      context.lineWidth = 2.5;
      context.strokeRect(x + 1, y + 1, Math.max(1, size - 2), tall - 2);
    }
  }
  const entries = tables.reduce((sum, t) => sum + t.entries, 0), hidden = entries - tables.reduce((sum, t) => sum + t.blocks.length, 0);
  const joint = physical.filter((b) => readers.get(b) > 1).length;
  const title = (state.feed.own.find((o) => o.id === state.feed.conversation) || {}).title || "";
  text("pages-title", title);
  const words = say(tables[0].running ? "@@dash.pages_running@@" : "@@dash.pages_stored@@", { n: entries, physical: say("@@dash.blocks@@", { n: physical.length }), joint });
  text("pages-note", sentences(words, copied.size && say("@@dash.pages_copied@@", { n: copied.size }), hidden && say("@@dash.pages_hidden@@", { n: hidden })));
  text("pages-twin", words);
  $("pages").dataset.tables = String(tables.length);
}
