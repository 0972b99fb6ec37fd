import * as api from "./api.js";
import { Pane } from "./pane.js";
import * as state from "./state.js";

const byId = (id) => document.getElementById(id);
const FIELDS = ["prompt", "mode", "max_tokens", "temperature", "seed"];
const CHECKS = ["probabilities", "beside"];
const KEY = "tokenrouter-api-key";
let deployment, panes = [], running = null;

async function start() {
  document.querySelector("main").hidden = false;
  const wanted = state.read();
  for (const id of FIELDS) if (wanted[id] !== undefined) byId(id).value = wanted[id];
  for (const id of CHECKS) if (wanted[id] !== undefined) byId(id).checked = wanted[id] === "true";
  await connect(wanted.panes);
}

async function connect(chosen = []) {
  fail("");
  try {
    deployment = await api.deployment(key());
  } catch (error) {
    byId("key-row").hidden = error.status !== 401;
    return fail(error.message);
  }
  byId("key-row").hidden = true;
  if (!deployment.chat) {
    byId("mode").value = "text";
    byId("mode").disabled = true;
    byId("mode").title = "This deployment has no chat template.";
  }
  byId("legend").replaceChildren(...deployment.models.map((name, index) => {
    const item = document.createElement("li");
    item.append(Object.assign(document.createElement("span"), { className: `tok w${index % 4}`, textContent: name }));
    return item;
  }));
  panes = [0, 1].map((at) => new Pane(deployment, chosen[at], remember));
  show();
}

function show() {
  byId("panes").replaceChildren(...panes.slice(0, byId("beside").checked ? 2 : 1).map((pane) => pane.element));
}

function key() { return sessionStorage.getItem(KEY) ?? ""; }

function fail(message) {
  byId("error").textContent = message;
  byId("error").hidden = !message;
}

function remember() {
  const now = Object.fromEntries([...FIELDS.map((id) => [id, byId(id).value]), ...CHECKS.map((id) => [id, byId(id).checked])]);
  try {
    state.write({ ...now, panes: panes.map((pane) => pane.state) });
  } catch (error) {
    if (!(error instanceof SyntaxError)) throw error;  // half-typed JSON in a knob
  }
}

function body() {
  const chat = byId("mode").value === "chat";
  const prompt = byId("prompt").value;
  return {
    path: chat ? "/v1/chat/completions" : "/v1/completions",
    body: {
      ...(chat ? { messages: [{ role: "user", content: prompt }] } : { prompt }),
      ...(byId("probabilities").checked ? { logprobs: chat ? true : 1 } : {}),
      ...optional("max_tokens"), ...optional("temperature"), ...optional("seed"),
      stream: true, return_routing: true,
    },
  };
}

function optional(id) { return byId(id).value === "" ? {} : { [id]: Number(byId(id).value) }; }

async function run() {
  if (running) return;
  if (!deployment) await connect();
  if (!deployment) return;
  remember();
  running = new AbortController();
  busy(true);
  const shown = panes.slice(0, byId("beside").checked ? 2 : 1);
  await Promise.all(shown.map((pane) => pane.run({ ...body(), key: key(), signal: running.signal })));
  running = null;
  busy(false);
}

function busy(now) {
  byId("run").disabled = now;
  byId("stop").disabled = !now;
  byId("status").textContent = now ? "writing" : "done";
}

byId("form").addEventListener("submit", (event) => { event.preventDefault(); run(); });
byId("form").addEventListener("change", () => { show(); remember(); });
byId("stop").addEventListener("click", () => running?.abort());
byId("link").addEventListener("click", async () => {
  remember();
  try {
    await navigator.clipboard.writeText(location.href);
    byId("status").textContent = "link copied";
  } catch {
    byId("status").textContent = "the link is in the address bar";
  }
});
byId("record").addEventListener("click", async () => {
  byId("record").disabled = true;
  byId("record").textContent = "recording";
  fail("");
  try {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(await api.timeline(byId("seconds").value, key()));
    link.download = "trace.json";
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  } catch (error) {
    fail(error.message);
  }
  byId("record").textContent = "Timeline";
  byId("record").disabled = false;
});
byId("use-key").addEventListener("click", () => { sessionStorage.setItem(KEY, byId("key").value); connect(); });
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); run(); }
  if (event.key === "Escape") running?.abort();
});
start();
