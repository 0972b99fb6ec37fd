// What the page is set to. It stands in the fragment of the address, which browsers never send to a server.

export function read() {
  const fields = new URLSearchParams(location.hash.slice(1));
  const state = Object.fromEntries(fields);
  state.panes = fields.getAll("pane").map(parsed).filter((pane) => pane && typeof pane.writer === "string");
  return state;
}

export function write(state) {
  const fields = new URLSearchParams();
  for (const [name, value] of Object.entries(state)) if (name !== "panes") fields.set(name, value);
  for (const pane of state.panes) fields.append("pane", JSON.stringify(pane));
  history.replaceState(null, "", `#${fields}`);
}

function parsed(text) {
  try { return JSON.parse(text); } catch { return null; }
}
