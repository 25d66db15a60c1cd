// The prefix tree, from left to right: a bar is a chain of blocks, as long as its bytes; it spans the branches
// behind it. Where bars split, texts part; a notch marks a block that was copied there.

const tree = { bars: [] };
const TREE_EMPTY = "@@dash.tree_empty@@";
const TREE_HINT = "@@dash.tree_hint@@";

function layTree(nodes) {
  const children = nodes.map(() => []), roots = [];
  nodes.forEach((node, i) => (node.parent < 0 ? roots : children[node.parent]).push(i));
  const start = new Array(nodes.length), top = new Array(nodes.length), leaves = new Array(nodes.length);
  let deepest = 1;
  for (let i = nodes.length - 1; i >= 0; i--) {
    leaves[i] = children[i].reduce((sum, child) => sum + leaves[child], 0) + (nodes[i].left_out > 0 ? 1 : 0) || 1;
  }
  const place = (list, from, x) => {
    let y = from;
    for (const i of list) {
      start[i] = x;
      top[i] = y;
      deepest = Math.max(deepest, x + nodes[i].blocks);
      place(children[i], y, x + nodes[i].blocks);
      y += leaves[i];
    }
    return y;
  };
  const rows = place(roots, 0, 0);
  return { start, top, leaves, deepest, rows: Math.max(rows, 1) };
}

// Titles that the viewer may know, and how many others there are.
const documentName = (titles, hidden) => [titles, hidden ? say("@@dash.hidden@@", { n: hidden }) : ""].filter(Boolean).join(", ");

function nodeName(node) {
  const name = node.kind === "instructions" ? "@@dash.instructions@@" : node.kind === "document" ? documentName(node.label, node.hidden)
    : node.mine ? "@@dash.branch_mine@@" : "@@dash.branch@@";
  return node.tail ? say("@@dash.tail@@", { name }) : name;
}
const treeReaders = (node) => (state.view === "running" ? node.readers : node.open_readers);

function drawTree() {
  const picture = state.tree;
  if (!picture) return;
  const { nodes } = picture, laid = layTree(nodes);
  const row = Math.max(4, Math.min(26, Math.floor(420 / laid.rows)));
  const drawn = surface("tree", Math.max(60, laid.rows * row));
  if (!drawn) return;
  const { context, width } = drawn, c = colours().css;
  const unit = width / laid.deepest;
  tree.bars = nodes.map((node, i) => {
    const x = laid.start[i] * unit, y = laid.top[i] * row;
    const w = Math.max(2, node.blocks * unit - 1), h = Math.max(2, laid.leaves[i] * row - (row > 6 ? 2 : 1));
    const colour = readerColour(treeReaders(node), node.pinned);
    context.fillStyle = colour;
    context.beginPath();
    context.roundRect(x, y, w, h, Math.min(4, h / 2, w / 2));
    context.fill();
    if (node.mine) {
      context.strokeStyle = c.mine;
      context.lineWidth = 2;
      context.stroke();
    }
    if (node.copied) {
      context.fillStyle = c.mine;
      const size = Math.min(9, h);
      context.beginPath();
      context.moveTo(x, y + (h - size) / 2);
      context.lineTo(x + size * 0.8, y + h / 2);
      context.lineTo(x, y + (h + size) / 2);
      context.fill();
    }
    if (h >= 13 && (node.kind !== "branch" || w > 70)) {
      context.fillStyle = inkOn(colour);
      const readers = treeReaders(node);
      const label = node.kind === "branch" && !node.mine ? bytes(node.blocks * picture.block_bytes) : `${nodeName(node)} · ${say("@@dash.readers@@", { n: readers })}`;
      context.fillText(fitted(context, label, w - 20), x + 12, y + h / 2 + 4);
    }
    return { x, y, w, h, node };
  });
  list("tree-twin", nodes.slice(0, 40).map((node) =>
    [`${nodeName(node)}: ${bytes(node.blocks * picture.block_bytes)}`, say("@@dash.readers@@", { n: treeReaders(node) }), node.copied ? say("@@dash.node_copied@@", { n: node.copied }) : ""].filter(Boolean).join(", ")),
    (line) => make("li", line));
  $("tree").dataset.nodes = String(nodes.length);
  const said = $("tree-hover").textContent;
  if (!nodes.length) text("tree-hover", TREE_EMPTY);
  else if (said === TREE_EMPTY) text("tree-hover", TREE_HINT);
}

function pointAtTree(event) {
  const box = $("tree").getBoundingClientRect();
  const x = event.clientX - box.left, y = event.clientY - box.top;
  const hit = tree.bars.find((b) => x >= b.x && x <= b.x + b.w && y >= b.y && y <= b.y + b.h);
  if (!hit) return;
  const { node } = hit, unit = state.tree.block_bytes;
  const blocks = say("@@dash.blocks@@", { n: node.blocks });
  const parts = [nodeName(node), say("@@dash.node_blocks@@", { blocks, size: bytes(node.blocks * unit), n: node.tokens }),
    say("@@dash.readers_running@@", { readers: say("@@dash.readers@@", { n: node.open_readers }), n: node.readers })];
  if (node.below > node.blocks) parts.push(say("@@dash.node_behind@@", { size: bytes((node.below - node.blocks) * unit) }));
  if (node.left_out) parts.push(say("@@dash.node_left@@", { n: node.left_out }));
  if (node.copied) parts.push(say("@@dash.node_copied@@", { n: node.copied }));
  if (node.pinned) parts.push("@@panel.pinned@@");
  text("tree-hover", parts.join(" · "));
}
