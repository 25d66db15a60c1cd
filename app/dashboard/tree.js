// The prefix tree, from left to right: a bar is a chain of blocks, as long as its bytes; it spans the branches
// behind it. Where bars split, texts part; a notch marks a block that was copied there.

const tree = { bars: [] };
const TREE_EMPTY = "Nothing is indexed yet: ask a question.";
const TREE_HINT = "Where one bar splits, texts part. A notch marks a block that was copied there.";

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

function nodeName(node) {
  const name = node.kind === "instructions" ? "instructions" : node.kind === "document" ? node.label : node.mine ? "this conversation" : "a reader’s own text";
  return node.tail ? `${name} (open tail)` : name;
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
      const label = node.kind === "branch" && !node.mine ? bytes(node.blocks * picture.block_bytes) : `${nodeName(node)} · ${plural(readers, "reader")}`;
      context.fillText(fitted(context, label, w - 20), x + 12, y + h / 2 + 4);
    }
    return { x, y, w, h, node };
  });
  list("tree-twin", nodes.slice(0, 40).map((node) =>
    `${nodeName(node)}: ${bytes(node.blocks * picture.block_bytes)}, ${plural(treeReaders(node), "reader")}${node.copied ? `, ${plural(node.copied, "block")} copied` : ""}`),
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
  const parts = [nodeName(node), `${plural(node.blocks, "block")}, ${bytes(node.blocks * unit)}, ${plural(node.tokens, "token")}`,
    `${plural(node.readers, "running reader")}, ${plural(node.open_readers, "open reader")}`];
  if (node.below > node.blocks) parts.push(`${bytes((node.below - node.blocks) * unit)} behind it`);
  if (node.left_out) parts.push(`${plural(node.left_out, "block")} not shown`);
  if (node.copied) parts.push(`${plural(node.copied, "block")} copied here`);
  if (node.pinned) parts.push("pinned");
  text("tree-hover", parts.join(" · "));
}
