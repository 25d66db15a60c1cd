// The memory page's script, in the order feed, core, map, tree, pages, side, replay, live (joined by page.py into the
// `js_on_load` of one gr.HTML whose template never changes). Data reach the page through canvas and
// textContent only. `element` and `server` are given by Gradio.

const $ = (name) => element.querySelector(`[data-cd="${name}"]`);
const DASH = "–";
const calm = matchMedia("(prefers-reduced-motion: reduce)");
const state = { view: "open", feed: null, cells: new Uint8Array(0), tree: null, pages: null, history: null };

function bytes(count) {
  if (count === null || count === undefined || Number.isNaN(count)) return DASH;
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (Math.abs(count) < 1024) return `${count.toFixed(unit === "B" ? 0 : 1)} ${unit}`;
    count /= 1024;
  }
  return `${count.toFixed(1)} TiB`;
}
const number = (count) => Number(count).toLocaleString("en");
const percent = (part, whole) => (whole > 0 ? `${Math.round((100 * part) / whole)}%` : DASH);

const sentences = (...parts) => parts.filter(Boolean).join(LANGUAGE === "en" ? " " : "");

function text(name, value) {
  const node = $(name);
  if (node && node.textContent !== value) node.textContent = value;
}
function make(tag, value, className) {
  const node = document.createElement(tag);
  node.textContent = value;
  if (className) node.className = className;
  return node;
}
function bar(name, value, most, label) {
  $(`${name}-bar`).style.inlineSize = `${most > 0 ? Math.max(value > 0 ? 0.6 : 0, (100 * value) / most) : 0}%`;
  text(name, label);
}

// Colours come from the style sheet, so that light, dark and a reader's own style all hold.
let palette = null;
function colours() {
  if (palette) return palette;
  const style = getComputedStyle(element.querySelector(".cr-dash"));
  const css = (name) => style.getPropertyValue(name).trim();
  const rgb = (name) => {
    const hex = css(name).replace("#", "");
    return [0, 2, 4].map((i) => parseInt(hex.slice(i, i + 2), 16));
  };
  palette = {
    css: { free: css("--cr-free"), retained: css("--cr-retained"), pinned: css("--cr-pinned"), ink: css("--cr-ink"), soft: css("--cr-soft"),
      line: css("--cr-line"), card: css("--cr-card"), mine: css("--cr-mine"), good: css("--cr-good"),
      readers: ["--cr-r1", "--cr-r2", "--cr-r3", "--cr-r4"].map(css) },
    free: rgb("--cr-free"), retained: rgb("--cr-retained"), pinned: rgb("--cr-pinned"),
    readers: ["--cr-r1", "--cr-r2", "--cr-r3", "--cr-r4"].map(rgb),
  };
  return palette;
}
function readerColour(readers, pinned) {
  const c = colours().css;
  return readers > 0 ? c.readers[Math.min(readers, 4) - 1] : pinned ? c.pinned : c.retained;
}
function inkOn(colour) {
  const hex = colour.replace("#", "");
  const [r, g, b] = [0, 2, 4].map((i) => parseInt(hex.slice(i, i + 2), 16));
  return 0.299 * r + 0.587 * g + 0.114 * b > 140 ? "#10161d" : "#ffffff";
}

// A canvas of the given CSS size at the screen's own resolution, cleared, with CSS pixels as its unit.
function surface(name, height) {
  const canvas = $(name);
  const width = canvas.parentElement.clientWidth;
  if (!width) return null;
  const ratio = window.devicePixelRatio || 1;
  const wide = Math.round(width * ratio), high = Math.round(height * ratio);
  if (canvas.width !== wide || canvas.height !== high) {
    canvas.width = wide;
    canvas.height = high;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = "12px system-ui, sans-serif";
  return { canvas, context, width, height };
}
function fitted(context, value, room) {
  if (room < 18) return "";
  if (context.measureText(value).width <= room) return value;
  let cut = value.length;
  while (cut > 1 && context.measureText(`${value.slice(0, cut)}…`).width > room) cut = Math.floor(cut * 0.8);
  return cut > 2 ? `${value.slice(0, cut)}…` : "";
}

// Rebuilds a list of elements only where what it would say has changed.
const listed = new Map();
function list(name, said, build) {
  const key = JSON.stringify(said);
  if (listed.get(name) === key) return;
  listed.set(name, key);
  $(name).replaceChildren(...said.map(build));
}
