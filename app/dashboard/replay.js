// Recordings: updates as they once came, taken by a follower of their own. Always labelled, always with a way
// back; the one that starts by itself when nobody reads ends by itself as soon as somebody does.

const LIVE_ONLY = "coread.live"; // of this tab: somebody went back to live, so no recording starts by itself
const REPLAY_WORDS = {
  engine: "Recording, not live: twelve scripted readers on this engine",
  simulation: "Recording, not live: a simulation of a large pool. Memory, prefix tree and scheduler are real, the model is not",
};

async function play(name, byItself = false) {
  const found = await server.recording(name).catch(() => ({ error: "No answer from the server." }));
  if (found.error) return problem(found.error);
  const recording = JSON.parse(new TextDecoder().decode(await inflate(found.packed)));
  if (byItself && live.replay) return;
  clearTimeout(live.timer);
  live.replay = { recording, byItself };
  const run = live.replay;
  let frame = 0, follow = follower();
  const next = async () => {
    if (live.replay !== run || !element.isConnected) return;
    if (!document.hidden) {
      const at = frame % recording.frames.length;
      if (at === 0) follow = follower();
      label(recording, at, byItself);
      await show(await follow.take(structuredClone(recording.frames[at])));
      frame++;
    }
    live.timer = setTimeout(next, 1000 * recording.every_s);
  };
  next();
  if (byItself) setTimeout(() => watch(run), 4000);
}

function label(recording, at, byItself) {
  const seconds = (frames) => number(Math.round(frames * recording.every_s));
  const made = `made on ${recording.made}${recording.kind === "engine" ? ` with ${recording.model} on ${recording.device}` : ""}`;
  const why = byItself ? " It plays because nobody is reading right now." : "";
  text("recording-text", `${REPLAY_WORDS[recording.kind]}, ${made}.${why} Second ${seconds(at)} of ${seconds(recording.frames.length)}.`);
  $("recording").hidden = false;
  for (const name of ["replay-engine", "replay-simulation"]) $(name).hidden = true;
}

// Looks now and then whether there is something live to show.
async function watch(run) {
  if (live.replay !== run || !element.isConnected) return;
  if (!document.hidden) {
    const feed = await askFeed({}, "", "").catch(() => null);
    if (live.replay === run && feed && busy(feed)) return stopReplay();
  }
  setTimeout(() => watch(run), 4000);
}
const busy = (feed) => feed.demo.running || (feed.open && feed.open.everybody.conversations > 0);

function stopReplay() {
  clearTimeout(live.timer);
  live.replay = null;
  live.follow = follower();
  live.seen = undefined;
  live.turn = 0;
  $("recording").hidden = true;
  offerRecordings();
  poll();
}

function offerRecordings() {
  for (const name of ["replay-engine", "replay-simulation"]) $(name).hidden = !live.recordings.includes(name.slice(7));
}

function wantsRecording(feed) {
  return live.turn === 1 && !calm.matches && feed.pool && !busy(feed)
    && live.recordings.includes("simulation") && sessionStorage.getItem(LIVE_ONLY) === null;
}
