// Everything beside the pictures: figures, bars, rows, savings over time, what-if and the calculator.

function showFigures() {
  const { pool, since_start: since, engine } = state.feed;
  const { everybody } = state.feed[state.view];
  const ratio = everybody.physical_bytes ? everybody.unshared_bytes / everybody.physical_bytes : 1;
  text("saved", bytes(everybody.saved_bytes));
  text("saved-note", everybody.saved_bytes ? `each block kept is read ${ratio.toFixed(1)} times` : "nothing is shared right now");
  text("people", number(everybody.conversations));
  text("people-note", `${plural(engine.running, "answer")} being written${state.feed.waiting ? `, ${number(state.feed.waiting)} waiting` : ""}`);
  text("skipped", percent(since.prefill_tokens_skipped, since.prompt_tokens));
  text("skipped-note", `${number(since.prefill_tokens_skipped)} of ${number(since.prompt_tokens)} since start`);
  text("unread", percent(since.kv_bytes_logical - since.kv_bytes_read, since.kv_bytes_logical));
  text("unread-note", `${bytes(since.kv_bytes_logical - since.kv_bytes_read)} since start`);
  text("pool", `${number(pool.total_blocks)} blocks of ${pool.block_size} tokens, ${bytes(pool.block_bytes)} each; ${number(pool.free)} free`);
  text("engine", `${engine.model} · ${engine.dtype} on ${engine.device} · ${engine.backend} · pool of ${bytes(pool.total_blocks * pool.block_bytes)}`);
  text("since-peak", bytes(since.peak_saved_bytes));
  text("since-time", `${(since.saved_byte_seconds / 2 ** 30).toFixed(2)} GiB·s`);
  text("since-skipped", number(since.prefill_tokens_skipped));
  text("since-computed", number(since.prefill_tokens_computed));
  text("since-copied", `${number(since.blocks_copied)} (${bytes(since.bytes_copied)})`);
  text("since-evicted", number(since.evictions));
  text("since-answers", `${number(since.answers)}, ${number(since.preemptions)}`);
  text("utilisation", pool.utilisation === null ? DASH : `${Math.round(100 * pool.utilisation)}%`);
  text("twin", `Memory pool of ${number(pool.total_blocks)} blocks: ${number(pool.free)} free, ${number(pool.held)} held, `
    + `${number(pool.retained)} kept for reuse, ${number(pool.pinned)} pinned. `
    + `${plural(everybody.conversations, "conversation")} ${state.view === "running" ? "running now" : "open"}; ${$("shared").textContent} blocks have two or more readers, `
    + `which saves ${bytes(everybody.saved_bytes)}: ${bytes(everybody.unshared_bytes)} with paging alone, ${bytes(everybody.physical_bytes)} as they are.`);
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
  text("mine-note", mine ? `${plural(mine.blocks, "block")}, ${number(mine.shared_blocks)} of them shared; sharing saves ${bytes(mine.saved_bytes)}`
    : state.view === "running" ? "Nothing is being written for it right now." : "Nothing of it is in memory yet.");
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
    if (!own.length) select.append(make("option", "none yet"));
  }
  if (conversation) select.value = conversation;
}

function showRows() {
  const names = { other: "somebody", system: "the engine itself" };
  let others = 0;
  const said = state.feed.rows[state.view].map((row) => [
    row.kind, row.running,
    row.kind === "own" ? row.title : row.kind === "rest" ? plural(row.count, "other conversation") : row.kind === "other" ? `somebody ${++others}` : names[row.kind],
    number(row.blocks), number(row.shared_blocks), bytes(row.unshared_bytes), bytes(row.fair_share_bytes), bytes(row.saved_bytes)]);
  list("rows", said, ([kind, running, name, ...figures]) => {
    const line = make("tr", "");
    line.dataset.kind = kind;
    const first = make("td", ""), dot = make("span", "", running ? "cd-dot cd-on" : "cd-dot");
    dot.title = running ? "running" : "open";
    first.append(dot, name);
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
  text("chart-note", `${minutes < 2 ? `${Math.round(span)} s` : `${Math.round(minutes)} min`} up to now, at most ${bytes(most)}`);
}

function showWhatIf() {
  const w = state.feed.what_if;
  text("what-if", w
    ? `Without sharing, the ${plural(w.conversations, "open conversation")} would need ${bytes(w.unshared_bytes)}; in contiguous caches, ${bytes(w.reserved_bytes)}. `
      + `This pool of ${bytes(w.pool_bytes)} would hold about ${number(w.contiguous_users)} such readers contiguously, ${number(w.paged_users)} with paging, and ${number(w.shared_users)} sharing as now.`
    : "Nobody has anything in memory yet.");
}

let sizing = 0;
function askSize() {
  clearTimeout(sizing);
  sizing = setTimeout(async () => {
    const work = { model: $("size-model").value, device_bytes: Number($("size-device").value), document_tokens: Number($("size-common").value), own_tokens: Number($("size-own").value) };
    const found = await server.size(work).catch(() => null);
    if (!found || found.error) {
      for (const name of ["contiguous", "paged", "shared"]) bar(`size-${name}`, 0, 1, DASH);
      text("size-note", found ? found.error : "No answer from the server; change a value to try again.");
      return;
    }
    for (const name of ["contiguous", "paged", "shared"]) {
      bar(`size-${name}`, found[`${name}_users`], found.shared_users, `${number(found[`${name}_users`])} readers`);
    }
    text("size-note", `${bytes(found.weights_bytes)} of weights leave ${bytes(found.pool_bytes)} for KV. A reader takes ${bytes(found.contiguous_bytes)} contiguously, `
      + `${bytes(found.paged_bytes)} paged, ${bytes(found.own_bytes)} beside the shared ${bytes(found.document_bytes)}.`);
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
