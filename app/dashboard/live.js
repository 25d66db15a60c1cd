// Polling and controls. One update in flight at a time; nothing while the page is hidden.

const live = { delay: 1000, timer: 0, seen: undefined, chosen: "", follow: follower(), replay: null, recordings: [], offered: false, turn: 0 };

async function show(feed) {
  const { engine, demo } = feed;
  const ready = engine.state === "ready";
  $("warming").hidden = ready && !engine.seeding;
  text("warming", say(ready ? "@@panel.seeding@@" : engine.state === "failed" ? "@@panel.failed@@" : "@@panel.detail@@", { detail: engine.detail }));
  $("body").hidden = !ready && !feed.pool;
  showDemo(demo, ready);
  if (!feed.pool) return;
  Object.assign(state, { cells: feed.cells, feed, tree: feed.tree || null, history: feed.history || null });
  state.pages = feed.pages && feed.pages.length ? feed.pages : null;
  showChoices();
  draw();
  flash(feed.flash, live.seen);
  live.seen = feed.event_number;
}
function draw() {
  if (!state.feed) return;
  drawMap();
  showFigures();
  showBars();
  showRows();
  showWhatIf();
  drawTree();
  drawPages();
  drawChart();
}
function showDemo(demo, ready) {
  if (demo.problem && demo.allowed && !live.replay) problem(demo.problem);
  const button = $("demo");
  button.hidden = !demo.allowed || live.replay !== null;
  button.disabled = demo.running || !ready;
  text("demo", demo.running ? say("@@dash.demo_runs@@", { arrived: demo.arrived, n: demo.readers, left: demo.left }) : "@@dash.demo@@");
}

async function poll() {
  clearTimeout(live.timer);
  if (!element.isConnected || live.replay) return;
  if (document.hidden) {
    live.seen = undefined; // what happened meanwhile is not flashed afterwards
    live.timer = setTimeout(poll, 1000);
    return;
  }
  const turn = live.turn++, { follow } = live;
  try {
    const want = `p${turn % 10 === 0 ? "h" : ""}${turn % 2 === 0 ? "t" : ""}`;
    const update = await askFeed(follow.have, live.chosen, want);
    if (live.replay || live.follow !== follow) return;
    if (update) await show(await follow.take(update));
    const { feed } = follow;
    live.delay = feed.engine.running || feed.demo.running ? 500 : 1000;
    if (!feed.demo.problem) problem("");
    if (wantsRecording(feed)) await play("simulation", true);
    if (live.replay) return;
  } catch (error) {
    live.delay = Math.min(live.delay * 2, 15000);
    problem("@@dash.offline@@");
  }
  live.timer = setTimeout(poll, live.delay);
}

function problem(message) {
  text("problem", message);
  $("problem").hidden = !message;
}
async function startDemo() {
  $("demo").disabled = true;
  const answer = await server.demo(0).catch(() => ({ error: "@@dash.offline_once@@" }));
  problem(answer.error || "");
  poll();
}

for (const button of element.querySelectorAll("[data-view]")) {
  button.addEventListener("click", () => {
    state.view = button.dataset.view;
    for (const other of element.querySelectorAll("[data-view]")) other.setAttribute("aria-pressed", String(other === button));
    draw();
  });
}
$("which").addEventListener("change", (event) => {
  live.chosen = event.target.value;
  poll();
});
$("demo").addEventListener("click", startDemo);
$("zoom").addEventListener("click", () => {
  map.whole = !map.whole;
  draw();
});
$("replay-engine").addEventListener("click", () => play("engine"));
$("replay-simulation").addEventListener("click", () => play("simulation"));
$("live").addEventListener("click", () => {
  sessionStorage.setItem(LIVE_ONLY, "1");
  stopReplay();
});
for (const name of ["mousemove", "click"]) {
  $("map").addEventListener(name, pointAt);
  $("tree").addEventListener(name, pointAtTree);
}
for (const name of ["size-model", "size-device", "size-common", "size-own"]) $(name).addEventListener("input", askSize);
new ResizeObserver(draw).observe(element.querySelector(".cr-dash"));
const recolour = () => {
  palette = null;
  draw();
};
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolour);
new MutationObserver(recolour).observe(document.body, { attributes: true, attributeFilter: ["class"] });
offerChoices().finally(poll);
