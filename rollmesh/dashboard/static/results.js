// The tables of results: an evaluation's report, the environment's metrics, failed rollouts.

import { byId, element, fillTable } from "./dom.js";
import { count, figure, isNumber, many, meanOf, share } from "./format.js";
import { hasOwnSuccess } from "./store.js";

const MEAN_STEPS = 10;
const PREFIX = "env/";

export function drawResults(store) {
  const { run, evaluation, learning } = store;
  show("reward-panel", !run.is_eval);
  show("success-panel", !run.is_eval && hasOwnSuccess(store));
  show("ages-panel", !run.is_eval);
  byId("memory-panel").classList.toggle("wide", Boolean(run.is_eval));
  for (const id of ["memory-panel", "rates"]) show(id, !run.is_eval || store.telemetry.length > 0);
  show("evaluation-panel", Boolean(run.is_eval && evaluation));
  if (run.is_eval && evaluation) drawEvaluation(evaluation);
  drawMetrics(store);
  drawFailed((run.is_eval ? evaluation?.failed : learning.failed) ?? []);
}

function show(id, isShown) {
  byId(id).hidden = !isShown;
}

function drawEvaluation({ report, split, num_samples: numSamples, model }) {
  byId("evaluation-note").textContent = `${many(report.num_rollouts, "rollout")} of ${many(report.num_tasks, "task")}, `
    + `${numSamples} per task, split ${split}${model ? `, model ${model}` : ""}`;
  const estimates = [
    ["reward", report.reward],
    ...(report.success ? [["success", report.success]] : []),
    ...Object.entries(report.pass_at ?? {}).map(([k, estimate]) => [`pass@${k}`, estimate]),
    ...Object.entries(report.metrics ?? {}).filter(([name]) => name !== "success"),
  ];
  const plain = [["tokens per rollout", report.tokens_per_rollout], ["turns per rollout", report.turns_per_rollout],
    ["s per rollout", report.s_per_rollout], ...(report.num_truncated ? [["truncated", report.num_truncated]] : [])];
  const number = (value) => [value, "number"];
  fillTable(byId("evaluation"), ["", number("mean"), number("95% interval"), number("tasks")], [
    ...estimates.map(([name, estimate]) => [name, number(figure(estimate?.mean)), number(interval(estimate)), number(count(estimate?.num_tasks))]),
    ...plain.map(([name, value]) => [name, number(isNumber(value) ? share(value) : "\u2013"), "", ""]),
  ]);
  byId("evaluation-failures").replaceChildren(...Object.entries(report.failures).map(([cause, failure]) =>
    element("li", {}, `${many(failure.num_rollouts, "rollout")} failed: ${cause}`)));
}

const interval = (estimate) => (isNumber(estimate?.low) && isNumber(estimate?.high) ? `${figure(estimate.low)} to ${figure(estimate.high)}` : "\u2013");

function drawMetrics({ run, steps }) {
  const names = [...new Set(steps.flatMap(Object.keys))].filter((name) => name.startsWith(PREFIX)).sort();
  show("metrics-panel", !run.is_eval && names.length > 0);
  const recent = steps.slice(-MEAN_STEPS);
  fillTable(byId("metrics"), ["Metric", ["last step", "number"], [`mean of ${MEAN_STEPS}`, "number"]],
    names.map((name) => [name.slice(PREFIX.length), [figure(steps.at(-1)?.[name]), "number"], [figure(meanOf(recent.map((row) => row[name]))), "number"]]));
}

function drawFailed(failed) {
  show("failed-panel", failed.length > 0);
  const open = (id) => element("a", { href: `#${encodeURI(id)}` }, id);
  fillTable(byId("failed"), ["Rollout", "Task", "Outcome", "Error", "Place"],
    failed.map(({ rollout_id: id, task_id: task, outcome, error, place }) =>
      [open(id), task, [outcome, "bad"], [withoutPlace(error, place), "error"], place || "\u2013"]));
}

/** The error's text without the place that ends it, which has a column of its own. */
const withoutPlace = (error, place) => (place && error.endsWith(` (${place})`) ? error.slice(0, -place.length - 3) : error);
