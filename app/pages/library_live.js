// Looking again: once a second while something is under way, else every few seconds; never while hidden, one
// look at a time.

let timer = 0, looking = false, again = false, delay = 4000, wasBusy = false;
async function poll() {
  clearTimeout(timer);
  if (!element.isConnected) return;
  if (document.hidden) {
    timer = setTimeout(poll, 1000);
    return;
  }
  if (looking) {
    again = true;
    return;
  }
  looking = true;
  again = false;
  let problem = "@@library.offline@@";
  try {
    const follow = uploads.filter(({ id, stage }) => id && stage !== "cancelled").map(({ id }) => id);
    const { collection, filter } = state;
    const look = await server.look({ collection, filter, follow });
    if (look.error) {
      problem = look.error; // somebody whose session has ended must not think that the server is gone
      throw new Error(problem);
    }
    $("offline").hidden = true;
    $("warming").hidden = !look.warming_up;
    if (look.warming_up) {
      put($("warming"), look.warming_up);
      delay = 1000;
    } else if (collection !== state.collection || filter !== state.filter) again = true; // chosen meanwhile
    else {
      show(look);
      const busy = underWay() || look.warming?.state === "reading" || look.warming?.state === "waiting"
        || look.documents.some(({ status }) => ["queued", "parsing", "embedding"].includes(status));
      // Long lists cost the server more; what the memory holds is told a second late, hence one look behind it.
      delay = busy ? 700 : wasBusy ? 1500 : Math.max(4000, 2 * (look.total || 0));
      wasBusy = busy;
    }
  } catch (error) {
    delay = Math.min(2 * delay, 15000);
    put($("offline"), problem);
    $("offline").hidden = false;
  }
  looking = false;
  timer = setTimeout(poll, again ? 0 : delay);
}
function show(look) {
  const first = !state.look;
  state.look = look;
  $("body").hidden = false;
  followUploads(look.followed);
  // Files that went to a collection of one's own are looked at there.
  const arrived = look.followed.find(({ collection }) => collection !== look.chosen);
  if (arrived && !state.arrived?.has(arrived.id)) {
    (state.arrived ||= new Set()).add(arrived.id);
    state.collection = arrived.collection;
    again = true;
  } else state.collection = look.chosen;
  showCollections();
  showUsage();
  showHead();
  showWarming();
  showDocuments();
  if (first) fromHash();
  if (state.open) openPage(false);
}
let typing = 0;
$("filter").addEventListener("input", () => {
  clearTimeout(typing);
  typing = setTimeout(() => {
    state.filter = $("filter").value;
    poll();
  }, 200);
});
$("create").addEventListener("click", createCollection);
document.addEventListener("visibilitychange", () => { if (!document.hidden) poll(); });
poll();
