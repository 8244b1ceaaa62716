// A sample's tokens as text, coloured by how surprising the policy found them.

import { element } from "./dom.js";
import { isNumber, share, signed } from "./format.js";

const MOST_SURPRISING = Math.log(100);
const SHOWN_AT_FIRST = 4000;
const LEGEND = [1, 0.5, 0.1, 0.01];

/** The colour's two mixes, from likely over doubtful to unlikely (probability 0.01 or less). */
function tint(logprob) {
  const surprise = Math.min(1, Math.max(0, -logprob / MOST_SURPRISING));
  const part = (value) => `${(100 * Math.min(1, Math.max(0, value))).toFixed(0)}%`;
  return { "--warm-up": part(2 * surprise), "--hot": part(2 * surprise - 1) };
}

const visible = (piece) => piece.replaceAll("\n", "\u23ce\n");

export function legend() {
  const swatches = LEGEND.map((p) => element("span", { class: "sampled swatch", ...tint(Math.log(p)) }, p));
  return element("p", { class: "legend" }, "sampled at p =", ...swatches,
    element("span", { class: "context" }, "context"), element("span", {}, element("span", { class: "version" }, "v7"), "policy version"));
}

/** The tokens of one sample; pointing at one describes it in `readout`. */
export function tokenText(sample, pieces, readout) {
  const box = element("div", { class: "tokens", "aria-label": "Tokens" });
  box.addEventListener("pointerover", (event) => {
    if (event.target.title) readout.textContent = event.target.title;
  });
  let version = null;
  const show = (from, to) => {
    for (let at = from; at < to; at += 1) {
      const isSampled = Boolean(sample.loss_mask[at]);
      if (isSampled && sample.policy_versions[at] !== version) {
        version = sample.policy_versions[at];
        box.append(element("span", { class: "version" }, `v${version}`));
      }
      box.append(token(sample, at, pieces[at], isSampled));
    }
  };
  const num = sample.token_ids.length;
  show(0, Math.min(num, SHOWN_AT_FIRST));
  if (num <= SHOWN_AT_FIRST) return box;
  const rest = element("button", { onclick: () => { rest.remove(); show(SHOWN_AT_FIRST, num); } }, `show all ${num} tokens`);
  return element("div", {}, box, rest);
}

function token(sample, at, piece, isSampled) {
  const id = `token ${sample.token_ids[at]}`;
  if (!isSampled) return element("span", { class: "context", title: `${id}, context` }, visible(piece));
  const logprob = sample.logprobs[at];
  const told = isNumber(logprob) ? `log-prob ${signed(logprob)} (p ${share(Math.exp(logprob))})` : "log-prob unknown";
  const title = `${id}, ${told}, policy version ${sample.policy_versions[at]}`;
  return element("span", { class: "sampled", ...tint(logprob ?? 0), title }, visible(piece));
}
