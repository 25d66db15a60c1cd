// How both pages follow the memory's figures. An update holds only the parts that are new; of the map, where
// one is known already, only what has changed (XOR). `follower` puts them together again.

async function inflate(packed) {
  const raw = Uint8Array.from(atob(packed), (c) => c.charCodeAt(0));
  const stream = new Blob([raw]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

function follower() {
  const have = {}; // letter -> key of the part that is here
  const self = { have, feed: { cells: new Uint8Array(0), flash: {} } };
  self.take = async (update) => {
    const changed = update.map?.packed ? await inflate(update.map.packed) : null;
    // Nothing is awaited from here on: of two updates on their way at once each is put on what is here by then.
    const feed = { ...self.feed, ...update };
    const keys = update.keys || [];
    if (update.map) {
      const { from } = update.map;
      if (from && from !== have.m) {
        // Two updates crossed on their way: the next one brings the whole map.
        keys.splice(0, keys.length, ...keys.filter((key) => key[0] !== "m"));
        delete have.m;
      } else if (changed) {
        if (from) changed.forEach((_, i) => (changed[i] ^= self.feed.cells[i]));
        feed.cells = changed;
      }
    }
    for (const view of ["running", "open"]) {
      if (feed[view]) feed[view] = { ...feed[view], mine: feed.mine ? feed.mine[view] : null };
    }
    for (const key of keys) have[key[0]] = key;
    self.feed = feed;
    return feed;
  };
  return self;
}

// `want`: letters of history, tree, pages, and g for no other conversation than the given one. Null: no news.
async function askFeed(have, conversation, want) {
  const url = new URL("api/memory/feed", document.baseURI);
  url.search = new URLSearchParams({ conversation, want, have: Object.values(have).join("_") });
  const answer = await fetch(url, { credentials: "same-origin", cache: "no-store" });
  if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
  return answer.status === 204 ? null : answer.json();
}
