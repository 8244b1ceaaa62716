// The list of recent rollouts and the viewer of one.

import { callsOf, isCall } from "./calls.js";
import { byId, element } from "./dom.js";
import { clock, count, figure } from "./format.js";
import { legend, tokenText } from "./tokens.js";

const REFRESH_MS = 3000;

export class Rollouts {
  #list = byId("rollout-list");
  #viewer = byId("viewer");
  #openId = null;
  #drawnAt = -Infinity;

  /** Show the latest; at most every few seconds, and never under the reader's hand. */
  draw(store, nowMs) {
    const isHeld = this.#list.matches(":hover") || this.#list.contains(document.activeElement);
    const isEmpty = this.#list.childElementCount === 0;
    if (!isEmpty && (isHeld || nowMs - this.#drawnAt < REFRESH_MS)) return;
    this.#drawnAt = nowMs;
    this.#list.replaceChildren(...store.trajectories.map((summary) => this.#row(summary, store.run)));
  }

  #row(summary, run) {
    const style = summary.outcome !== "completed" ? "bad" : summary.success === 1 ? "good" : summary.success === 0 ? "muted" : null;
    const reward = summary.reward === null ? summary.outcome : `reward ${figure(summary.reward)}`;
    const button = element("button", { type: "button", title: [summary.rollout_id, summary.error].filter(Boolean).join("\n"), onclick: () => this.open(summary.rollout_id) },
      element("span", { class: style }, summary.outcome === "completed" ? reward : summary.outcome),
      element("span", {}, summary.task_id),
      element("span", { class: "muted" }, calls(summary)),
      element("span", { class: "muted" }, run.is_eval ? "" : summary.step === null ? "not yet" : `step ${summary.step}`),
      element("span", { class: "muted" }, clock(summary.time_s - (run.started_s ?? summary.time_s))));
    button.dataset.id = summary.rollout_id;
    this.#mark(button);
    return element("li", {}, button);
  }

  #mark(button) {
    button.setAttribute("aria-current", String(button.dataset.id === this.#openId));
  }

  /** Open the rollout that the page's address names, if it names one. */
  openNamed() {
    const id = decodeURIComponent(location.hash.slice(1));
    if (id && id !== this.#openId) this.open(id);
  }

  async open(id) {
    this.#openId = id;
    history.replaceState(null, "", `#${id}`);
    this.#list.querySelectorAll("button").forEach((button) => this.#mark(button));
    const reply = await fetch(`/api/trajectories/${id.split("/").map(encodeURIComponent).join("/")}`);
    const told = await reply.json();
    if (id !== this.#openId) return;
    this.#viewer.replaceChildren(...(reply.ok ? readable(told) : [element("p", { class: "hint" }, told.error)]));
    this.#viewer.scrollTop = 0;
  }
}

const calls = ({ num_calls: num }) => (num === 1 ? "1 call" : `${count(num)} calls`);

function readable({ trajectory, pieces }) {
  const { samples } = trajectory;
  const facts = [trajectory.task_id, trajectory.outcome, trajectory.reward === null ? null : `reward ${figure(trajectory.reward)}`,
    calls(trajectory), trajectory.step === null ? null : `step ${trajectory.step}`, trajectory.worker_id];
  const metrics = Object.entries(trajectory.metrics).map(([name, value]) => `${name} ${figure(value)}`);
  const readout = element("p", { class: "readout" }, "Point at a token for its id, log-probability and policy version.");
  const texts = samples.flatMap((sample, at) => [
    samples.length > 1 ? element("h3", {}, `Sample ${at + 1} of ${samples.length}`) : null,
    tokenText(sample, pieces[at], readout),
  ]);
  return [
    element("h3", {}, `${trajectory.rollout_id} `, element("small", {}, facts.filter(Boolean).join(" \u00b7 "))),
    ...(metrics.length ? [element("p", { class: "metrics" }, metrics.join(" \u00b7 "))] : []),
    ...(trajectory.error ? [element("p", { class: "bad error" }, trajectory.error)] : []),
    element("ol", { class: "chat", "aria-label": "Messages" }, ...trajectory.messages.map(message)),
    ...(samples.length ? [legend(), readout, ...texts.filter(Boolean)] : [element("p", { class: "hint" }, "No samples were recorded.")]),
  ];
}

function message(said) {
  const calls = callsOf(said).map((text) => element("div", { class: "call" }, text));
  return element("li", { class: said.role === "assistant" ? "assistant" : null },
    element("span", { class: "role" }, said.role ?? "?"),
    element("div", { class: "said" }, contentText(said.content), ...calls));
}

/** A message's content: text, a list of parts, or nothing; calls are shown below it. */
function contentText(content) {
  if (typeof content === "string") return content;
  if (content === null || content === undefined) return "";
  if (Array.isArray(content)) return content.filter((part) => !isCall(part)).map(partText).join("\n");
  return JSON.stringify(content);
}

/** A part of a content: its text, a tool's result, or the name of its type. */
function partText(part) {
  if (typeof part === "string") return part;
  return part.text ?? (part.type === "tool_result" ? contentText(part.content) : `[${part.type ?? "part"}]`);
}
