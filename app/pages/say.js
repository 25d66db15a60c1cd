// `say(text, values)`: a text of the catalogue with its places filled; of `one|many` the part that `values.n`
// asks for. Numbers get separators. Every script of a page begins with this.
const LANGUAGE = document.documentElement.lang || "en";
function say(text, values = {}) {
  const parts = text.split("|");
  const chosen = parts.length > 1 && Number(values.n) !== 1 ? parts[1] : parts[0];
  return chosen.replace(/\{(\w+)(?::[^}]*)?\}/g, (_, name) => {
    const value = values[name];
    return typeof value === "number" ? value.toLocaleString("en") : String(value);
  });
}
