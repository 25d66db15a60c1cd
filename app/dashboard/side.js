// Everything beside the pictures: figures, bars, rows, savings over time, what-if and the calculator.

function showFigures() {
  const { pool, since_start: since, engine } = state.feed;
  const { everybody } = state.feed[state.view];
  const ratio = everybody.physical_bytes ? everybody.unshared_bytes / everybody.physical_bytes : 1;
  text("saved", bytes(everybody.saved_bytes));
  text("saved-note", everybody.saved_bytes ? say("@@dash.saved_note@@", { ratio: ratio.toFixed(1) }) : "@@dash.saved_none@@");
  text("people", number(everybody.conversations));
  const answers = say("@@dash.people_note@@", { n: engine.running });
  text("people-note", state.feed.waiting ? say("@@dash.people_waiting@@", { answers, n: state.feed.waiting }) : answers);
  text("skipped", percent(since.prefill_tokens_skipped, since.prompt_tokens));
  text("skipped-note", say("@@dash.skipped_note@@", { skipped: since.prefill_tokens_skipped, n: since.prompt_tokens }));
  text("unread", percent(since.kv_bytes_logical - since.kv_bytes_read, since.kv_bytes_logical));
  text("unread-note", !since.kv_bytes_logical ? "" : say("@@dash.unread_note@@", { size: bytes(since.kv_bytes_logical - since.kv_bytes_read) }));
  text("pool", say("@@dash.pool_is@@", { n: pool.total_blocks, size: pool.block_size, bytes: bytes(pool.block_bytes), free: pool.free }));
  text("engine", say("@@dash.engine_is@@", { ...engine, size: bytes(pool.total_blocks * pool.block_bytes) }));
  text("since-peak", bytes(since.peak_saved_bytes));
  text("since-time", `${(since.saved_byte_seconds / 2 ** 30).toFixed(2)} GiB·s`);
  text("since-skipped", number(since.prefill_tokens_skipped));
  text("since-computed", number(since.prefill_tokens_computed));
  text("since-copied", `${number(since.blocks_copied)} (${bytes(since.bytes_copied)})`);
  text("since-evicted", number(since.evictions));
  text("since-answers", number(since.answers));
  text("since-preempted", number(since.preemptions));
  text("utilisation", pool.utilisation === null ? DASH : `${Math.round(100 * pool.utilisation)}%`);
  text("twin", say(state.view === "running" ? "@@dash.twin_running@@" : "@@dash.twin_open@@", {
    total: pool.total_blocks, free: pool.free, held: pool.held, retained: pool.retained, pinned: pool.pinned,
    n: everybody.conversations, shared: $("shared").textContent, saved: bytes(everybody.saved_bytes),
    unshared: bytes(everybody.unshared_bytes), physical: bytes(everybody.physical_bytes),
  }));
}

function three(prefix, reserved, paged, physical) {
  for (const [name, value] of [["reserved", reserved], ["paged", paged], ["physical", physical]]) {
    bar(`${prefix}-${name}`, value, reserved, bytes(value));
  }
}
function showBars() {
  const { mine, everybody } = state.feed[state.view];
  three("all", everybody.reserved_bytes, everybody.unshared_bytes, everybody.physical_bytes);
  three("mine", mine ? mine.reserved_bytes : 0, mine ? mine.unshared_bytes : 0, mine ? mine.fair_share_bytes : 0);
  text("mine-note", mine ? say("@@dash.mine_note@@", { n: mine.blocks, shared: mine.shared_blocks, size: bytes(mine.saved_bytes) })
    : state.view === "running" ? "@@dash.mine_none_running@@" : "@@dash.mine_none_open@@");
}

let offered = "";
function showChoices() {
  const { own, conversation } = state.feed, select = $("which");
  const key = JSON.stringify(own);
  if (key !== offered) {
    offered = key;
    select.replaceChildren(...own.map(({ id, title }) => {
      const option = make("option", title);
      option.value = id;
      return option;
    }));
    if (!own.length) select.append(make("option", "@@dash.none_yet@@"));
  }
  if (conversation) select.value = conversation;
}

function showRows() {
  let others = 0;
  const said = state.feed.rows[state.view].map((row) => [
    row.kind, row.running,
    row.kind === "own" ? row.title : row.kind === "rest" ? say("@@dash.rest@@", { n: row.count }) : row.kind === "other" ? say("@@dash.somebody@@", { n: ++others }) : "@@dash.system@@",
    number(row.blocks), number(row.shared_blocks), bytes(row.unshared_bytes), bytes(row.fair_share_bytes), bytes(row.saved_bytes)]);
  list("rows", said, ([kind, running, name, ...figures]) => {
    const line = make("tr", "");
    line.dataset.kind = kind;
    const first = make("td", ""), dot = make("span", "", running ? "cd-dot cd-on" : "cd-dot");
    dot.title = running ? "@@panel.running@@" : "@@panel.open@@";
    first.append(dot, make("span", name, "cd-name"));
    line.append(first, ...figures.map((value) => make("td", value)));
    return line;
  });
}

function drawChart() {
  const samples = state.history;
  const drawn = surface("chart", 84);
  if (!drawn || !samples || samples.length < 2) return;
  const { context, width, height } = drawn, c = colours().css;
  const span = Math.max(samples[0][0], 10), most = Math.max(1, ...samples.map((s) => Math.max(s[1], s[2])));
  const at = (age) => width * (1 - Math.min(age, span) / span);
  const up = (value) => height - 4 - (height - 10) * (value / most);
  context.strokeStyle = c.line;
  context.beginPath();
  context.moveTo(0, height - 3.5);
  context.lineTo(width, height - 3.5);
  context.stroke();
  for (const [column, colour, fill] of [[2, c.good, true], [1, c.soft, false]]) {
    context.strokeStyle = colour;
    context.lineWidth = fill ? 2.5 : 1.5;
    context.beginPath();
    samples.forEach((s, i) => (i ? context.lineTo(at(s[0]), up(s[column])) : context.moveTo(at(s[0]), up(s[column]))));
    context.stroke();
    if (!fill) continue;
    context.lineTo(width, height - 4);
    context.lineTo(at(samples[0][0]), height - 4);
    context.globalAlpha = 0.14;
    context.fillStyle = colour;
    context.fill();
    context.globalAlpha = 1;
  }
  const minutes = span / 60;
  text("chart-note", minutes < 2 ? say("@@dash.chart_s@@", { n: Math.round(span), size: bytes(most) }) : say("@@dash.chart_min@@", { n: Math.round(minutes), size: bytes(most) }));
}

function showWhatIf() {
  const w = state.feed.what_if;
  text("what-if", w
    ? sentences(say("@@dash.what_need@@", { n: w.conversations, unshared: bytes(w.unshared_bytes), reserved: bytes(w.reserved_bytes) }),
      say("@@dash.what_fit@@", { size: bytes(w.pool_bytes), contiguous: w.contiguous_users, paged: w.paged_users, shared: w.shared_users }))
    : "@@dash.what_none@@");
}

let sizing = 0;
function askSize() {
  clearTimeout(sizing);
  sizing = setTimeout(async () => {
    const work = { model: $("size-model").value, device_bytes: Number($("size-device").value), document_tokens: Number($("size-common").value), own_tokens: Number($("size-own").value) };
    const found = await server.size(work).catch(() => null);
    if (!found || found.error) {
      for (const name of ["contiguous", "paged", "shared"]) bar(`size-${name}`, 0, 1, DASH);
      text("size-note", found ? found.error : "@@dash.size_failed@@");
      return;
    }
    for (const name of ["contiguous", "paged", "shared"]) {
      bar(`size-${name}`, found[`${name}_users`], found.shared_users, say("@@dash.readers@@", { n: found[`${name}_users`] }));
    }
    text("size-note", say("@@dash.size_note@@", {
      weights: bytes(found.weights_bytes), pool: bytes(found.pool_bytes), contiguous: bytes(found.contiguous_bytes),
      paged: bytes(found.paged_bytes), own: bytes(found.own_bytes), document: bytes(found.document_bytes),
    }));
  }, 250);
}
async function offerChoices() {
  const { models, devices, recordings } = await server.choices(0).catch(() => ({ models: [], devices: [], recordings: [] }));
  const option = (value, label) => Object.assign(make("option", label), { value });
  $("size-model").replaceChildren(...models.map((name) => option(name, name)));
  $("size-device").replaceChildren(...devices.map(({ name, bytes: size }) => option(size, name)));
  if (models.includes("Llama-3.1-8B")) $("size-model").value = "Llama-3.1-8B";
  if (devices.length > 1) $("size-device").value = devices[1].bytes;
  if (models.length) askSize();
  live.recordings = recordings;
  offerRecordings();
}
