// The switch leads to the page that it stands on (a relative link would lead to the start page).
const link = element.querySelector('[data-cr="switch"]');
link.href = location.pathname + link.getAttribute("href");

// A session that ended while its page was open (signed out elsewhere, expired, locked): whatever the page asks
// for next is answered so. That is said once, over everything; the one who asked is never answered, since
// Gradio would paint an error over the whole chat and the panel would say that the server is gone. The dialog
// stays: behind it nothing works any more.
const over = element.querySelector('[data-cr="signed-out"]');
over.addEventListener("cancel", (event) => event.preventDefault());
const unwatched = window.fetch;
const watched = async (...asked) => {
  const answer = await unwatched(...asked);
  if (answer.status !== 401 || !element.isConnected) return answer;
  const said = await answer.clone().json().catch(() => null);
  if (said?.error?.code !== "signed_out") return answer;
  if (!over.open) over.showModal();
  return new Promise(() => {});
};
window.fetch = watched;

// A note about the packaged model holds for that one only (and for the same weights from the hub); which model
// answers is known once it has been loaded.
async function honest() {
  if (!element.isConnected) return;
  let model = "";
  try {
    // From the feed, since a health check tells visitors no model.
    const answer = await fetch(new URL("api/memory/feed?want=g", document.baseURI), { cache: "no-store" });
    if (answer.ok) model = (await answer.json()).engine.model || "";
  } catch (error) {
    // The server restarts; asked again below.
  }
  if (model) element.querySelector('[data-cr="tiny"]').hidden = !/smollm2-135m/i.test(model);
  else setTimeout(honest, 3000);
}
honest();
