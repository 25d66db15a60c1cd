// Polling, controls and replays. One update in flight at a time; nothing while the page is hidden.

const live = { delay: 1000, timer: 0, seen: undefined, chosen: "", tree: "", replay: null, turn: 0 };

async function show(feed) {
  const { engine, demo } = feed;
  const ready = engine.state === "ready";
  $("warming").hidden = ready && !engine.seeding;
  text("warming", engine.detail);
  $("body").hidden = !ready && !feed.map;
  showDemo(demo, ready);
  if (!feed.map) return;
  state.cells = await inflate(feed.map.packed);
  state.feed = feed;
  if (feed.tree) {
    state.tree = feed.tree;
    live.tree = live.replay ? "" : feed.tree_key;
  }
  if (feed.pages || !feed.conversation) state.pages = feed.pages || null;
  if (feed.history) state.history = feed.history;
  showChoices();
  draw();
  flash(feed.flash);
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
  text("demo", demo.running ? `Demonstration: ${number(demo.arrived)} of ${number(demo.readers)} came, ${number(demo.left)} left` : "Start the demonstration");
}

async function poll() {
  clearTimeout(live.timer);
  if (!element.isConnected || live.replay) return;
  if (document.hidden) {
    live.seen = undefined; // what happened meanwhile is not flashed afterwards
    live.timer = setTimeout(poll, 1000);
    return;
  }
  const turn = live.turn++;
  try {
    const feed = await server.look({ conversation: live.chosen, after: live.seen, pages: true,
      history: turn % 5 === 0, ...(turn % 2 === 0 ? { tree: live.tree } : {}) });
    if (live.replay) return;
    live.seen = feed.event_number;
    await show(feed);
    live.delay = feed.engine.running || feed.demo.running ? 500 : 1000;
    if (!feed.demo.problem) problem("");
  } catch (error) {
    live.delay = Math.min(live.delay * 2, 15000);
    text("problem", "No answer from the server; trying again.");
    $("problem").hidden = false;
  }
  live.timer = setTimeout(poll, live.delay);
}

function problem(message) {
  text("problem", message);
  $("problem").hidden = !message;
}
async function startDemo() {
  $("demo").disabled = true;
  const answer = await server.demo(0).catch(() => ({ error: "No answer from the server." }));
  problem(answer.error || "");
  poll();
}

async function play() {
  const found = await server.recording(0).catch(() => ({ error: "No answer from the server." }));
  if (found.error) return problem(found.error);
  const recording = JSON.parse(new TextDecoder().decode(await inflate(found.packed)));
  clearTimeout(live.timer);
  live.replay = recording;
  state.tree = state.pages = state.history = null;
  text("replay", "Back to live");
  let frame = 0;
  const next = async () => {
    if (live.replay !== recording || !element.isConnected) return;
    if (!document.hidden) {
      const at = frame % recording.frames.length;
      if (at === 0) state.tree = state.pages = state.history = null;
      text("recording", `Recording, not live: made on ${recording.made} with ${recording.model} on ${recording.device}. Second ${number(Math.round(at * recording.every_s))} of ${number(Math.round(recording.frames.length * recording.every_s))}.`);
      $("recording").hidden = false;
      await show(recording.frames[at]);
      frame++;
    }
    live.timer = setTimeout(next, 1000 * recording.every_s);
  };
  next();
}
function stopReplay() {
  clearTimeout(live.timer);
  live.replay = null;
  live.seen = undefined;
  live.turn = 0;
  live.tree = "";
  $("recording").hidden = true;
  text("replay", "Play the recording");
  state.tree = state.pages = state.history = null;
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
$("replay").addEventListener("click", () => (live.replay ? stopReplay() : play()));
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
offerSizes();
server.choices(0).then(({ recording }) => ($("replay").hidden = !recording)).catch(() => {});
poll();
