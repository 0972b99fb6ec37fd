// One response: tokens as they stream, told apart by writer, and what it was made of.
import * as api from "./api.js";
import * as knobs from "./knobs.js";

const template = document.getElementById("pane");

export class Pane {
  constructor(deployment, chosen, changed) {
    this.deployment = deployment;
    this.element = template.content.cloneNode(true).firstElementChild;
    this.find = (selector) => this.element.querySelector(selector);
    this.select = this.find(".writer");
    const { entry, models, policies, policy } = deployment;
    const group = (label, names, value) => {
      const options = document.createElement("optgroup");
      options.label = label;
      for (const name of names) options.append(new Option(name, value(name)));
      this.select.append(options);
    };
    group("policy", policies.map(({ name }) => name), (name) => `${entry}:${name}`);
    group("one model", models, (name) => name);
    this.select.value = chosen?.writer ?? `${entry}:${policy}`;
    if (this.select.selectedIndex < 0) this.select.value = `${entry}:${policy}`;
    this.showKnobs(chosen?.params ?? {});
    this.select.addEventListener("change", () => { this.showKnobs({}); changed(); });
    this.element.addEventListener("change", changed);
    this.text = this.find(".text");
    this.tokens = [];
    this.text.addEventListener("keydown", (event) => this.move(event));
    this.text.addEventListener("mouseover", (event) => this.tell(event.target.closest(".tok")));
    this.text.addEventListener("click", (event) => this.choose(event.target.closest(".tok")));
  }

  get policy() { return this.deployment.policies.find(({ name }) => this.select.value === `${this.deployment.entry}:${name}`); }

  get state() { return { writer: this.select.value, params: this.policy ? knobs.given(this.find(".fields"), this.policy) : {} }; }

  showKnobs(values) {
    knobs.build(this.find(".fields"), this.policy, values);
    if (Object.keys(values).length) this.find(".knobs").open = true;
  }

  async run({ path, body, key, signal }) {
    this.clear();
    const began = performance.now();
    try {
      const { writer, params } = this.state;
      const own = Object.keys(params).length ? { policy_params: { ...this.policy.values, ...params } } : {};
      for await (const chunk of api.stream(path, { ...body, model: writer, ...own }, key, signal)) this.take(chunk, began);
    } catch (error) {
      if (error.name !== "AbortError") this.fail(error.message);
      else this.facts.set("ended", "stopped here");
    }
    this.facts.set("time", `${((performance.now() - began) / 1000).toFixed(2)} s`);
    this.summarise();
  }

  clear() {
    this.tokens = []; this.counts = new Map(); this.last = ""; this.facts = new Map();
    this.text.replaceChildren(); this.find(".token").textContent = ""; this.find(".bar").replaceChildren();
    this.find(".facts").replaceChildren(); this.find(".error").hidden = true;
  }

  fail(message) {
    const error = this.find(".error");
    error.textContent = message;
    error.hidden = false;
  }

  take(chunk, began) {
    for (const choice of chunk.choices ?? []) {
      const text = choice.text ?? choice.delta?.content ?? "";
      const parts = pieces(text, choice, this.deployment.models.includes(this.select.value) ? this.select.value : "");
      if (parts.length && !this.tokens.length) this.facts.set("first token", `${(performance.now() - began).toFixed(0)} ms`);
      for (const part of parts) this.add(part);
      if (choice.finish_reason) this.facts.set("ended", choice.finish_reason);
      if (choice.routing?.handoffs !== undefined) this.facts.set("hand-offs", choice.routing.handoffs);
      if (choice.routing?.policy) this.facts.set("policy", choice.routing.policy);
    }
  }

  add(part) {
    const span = document.createElement("span");
    span.className = `tok w${this.place(part.writer)}`;
    if (this.last && part.writer !== this.last) span.classList.add("handoff");
    this.last = part.writer;
    span.textContent = part.text;
    span.dataset.at = this.tokens.length;
    for (const writer of part.writers) this.counts.set(writer, (this.counts.get(writer) ?? 0) + 1);
    this.tokens.push(part);
    span.title = this.describe(part);
    this.text.append(span);
  }

  describe(part) {
    const sure = part.logProbs.map((value) => `${(100 * Math.exp(value)).toPrecision(3)} %`).join(", ");
    return [`${JSON.stringify(part.text)} by ${[...new Set(part.writers)].join(", ")}`, sure, part.ids.length ? `id ${part.ids.join(", ")}` : ""].filter(Boolean).join(" · ");
  }

  summarise() {
    const counts = [...this.counts].sort(([one], [other]) => this.place(one) - this.place(other));
    const total = counts.reduce((sum, [, count]) => sum + count, 0);
    const bar = this.find(".bar");
    bar.setAttribute("aria-label", counts.map(([writer, count]) => `${writer} ${count}`).join(", "));
    bar.replaceChildren(...counts.map(([writer, count]) => {
      const part = document.createElement("span");
      part.className = `w${this.place(writer)}`;
      part.style.flexGrow = count;
      return part;
    }));
    const shares = counts.map(([writer, count]) => [`by ${writer}`, `${count} (${(100 * count / total).toFixed(1)} %)`]);
    this.find(".facts").replaceChildren(...[["tokens", total], ...shares, ...this.facts].map(([name, value]) => {
      const row = document.createElement("div");
      row.append(Object.assign(document.createElement("dt"), { textContent: name }));
      row.append(Object.assign(document.createElement("dd"), { textContent: value }));
      return row;
    }));
  }

  // The number of a writer's colour and line.
  place(writer) { return Math.max(0, this.deployment.models.indexOf(writer)) % 4; }

  move(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step || !this.tokens.length) return;
    event.preventDefault();
    const now = Number(this.text.querySelector(".chosen")?.dataset.at ?? (step > 0 ? -1 : this.tokens.length));
    this.choose(this.text.children[Math.min(Math.max(now + step, 0), this.tokens.length - 1)]);
  }

  choose(span) {
    if (!span) return;
    this.text.querySelector(".chosen")?.classList.remove("chosen");
    span.classList.add("chosen");
    this.tell(span);
  }

  tell(span) { if (span) this.find(".token").textContent = span.title; }
}

// A chunk's text by token, where its texts are known (log-probabilities carry them); else as one piece.
function pieces(text, choice, only) {
  const writers = choice.routing?.writers ?? [];
  const ids = choice.routing?.token_ids ?? [];
  const texts = choice.logprobs?.content?.map((entry) => entry.token) ?? choice.logprobs?.tokens ?? [];
  const logProbs = choice.logprobs?.content?.map((entry) => entry.logprob) ?? choice.logprobs?.token_logprobs ?? [];
  const count = Math.max(writers.length, texts.length, text ? 1 : 0);
  if (!count) return [];
  const written = Array.from({ length: count }, (_, at) => writers[at] ?? only);
  if (texts.length === count && texts.join("") === text) {
    return texts.map((each, at) => ({ text: each, writer: written[at], writers: [written[at]], logProbs: logProbs.slice(at, at + 1), ids: ids.slice(at, at + 1) }));
  }
  return [{ text, writer: written.at(-1), writers: written, logProbs, ids }];
}
