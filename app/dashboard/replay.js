// Recordings: updates as they once came, taken by a follower of their own. Always labelled, always with a way
// back; the one that starts by itself when nobody reads ends by itself as soon as somebody does.

const LIVE_ONLY = "coread.live"; // of this tab: somebody went back to live, so no recording starts by itself

async function play(name, byItself = false) {
  const found = await server.recording(name).catch(() => ({ error: "@@dash.offline_once@@" }));
  if (found.error) return byItself ? undefined : problem(found.error);
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
      if (at === 0) {
        follow = follower();
        live.seen = undefined;
      }
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
  const what = say(recording.kind === "engine" ? "@@dash.rec_engine@@" : "@@dash.rec_simulation@@", recording);
  const seconds = (frames) => Math.round(frames * recording.every_s);
  const when = say("@@dash.rec_second@@", { at: seconds(at), n: seconds(recording.frames.length) });
  text("recording-text", sentences(what, byItself && "@@dash.rec_why@@", when));
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

// Once for each visit: while the models are being loaded, or where there is nothing to show.
function wantsRecording(feed) {
  if (live.offered || (!feed.pool && feed.engine.state !== "warming_up")) return false;
  live.offered = true;
  return !calm.matches && !busy(feed) && live.recordings.includes("simulation") && sessionStorage.getItem(LIVE_ONLY) === null;
}
