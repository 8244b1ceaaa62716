// The figures in words and tables: tiles, the staleness histogram, engines and workers.

import { byId, element, fillTable } from "./dom.js";
import { clock, count, figure, isNumber, meanOf, megabytes, percent, share } from "./format.js";
import { isSuccessKnown } from "./store.js";

const ETA_STEPS = 20;
const MEAN_STEPS = 10;

export function drawFigures(store) {
  drawHead(store);
  drawTiles(store);
  drawAges(store);
  drawFleet(store);
}

function drawHead({ run }) {
  byId("run-name").textContent = [run.name, run.env].filter(Boolean).join(" \u00b7 ");
  document.title = run.name ? `${run.name} \u00b7 rollmesh` : "rollmesh";
  byId("phase").className = `phase ${run.phase}`;
  byId("phase").textContent = run.num_bad_lines ? `${run.phase}, ${run.num_bad_lines} unreadable lines` : run.phase;
  const ending = [run.cause, run.resume && `To resume it: ${run.resume}`].filter(Boolean);
  byId("ending").className = `ending ${run.phase}`;
  byId("ending").replaceChildren(...ending.map((line) => element("span", {}, line)));
}

function drawTiles({ run, steps, learning, telemetry, evaluation }) {
  const last = learning.last ?? {};
  const now = telemetry.at(-1) ?? {};
  const recent = steps.slice(-MEAN_STEPS);
  const equal = meanOf(recent.map((row) => row.frac_equal_groups));
  const successes = isSuccessKnown({ steps })
    ? [[`Success, last ${MEAN_STEPS}`, share(meanOf(recent.map((row) => row.success))), isNumber(run.success_untrained) ? ` untrained ${share(run.success_untrained)}` : ""]]
    : [];
  const tiles = run.is_eval ? evaluationTiles(evaluation) : [
    ["Steps", count(isNumber(last.step) ? last.step + 1 : 0), run.num_steps ? ` of ${run.num_steps}` : ""],
    [`Reward, last ${MEAN_STEPS}`, figure(meanOf(recent.map((row) => row.reward))), isNumber(run.reward_untrained) ? ` untrained ${figure(run.reward_untrained)}` : ""],
    ...successes,
    ["Equal groups", equal === null ? "\u2013" : percent(equal), equal === 1 ? " no group differs" : ""],
    ["Policy version", count(last.policy_version), ""],
    ["Oldest sample", count(last.max_age), ` of ${run.max_staleness ?? "\u2013"} allowed`],
    run.phase === "running" ? ["Left, about", clock(secondsLeft(run, steps, last)), ""] : ["Took", clock(secondsTaken(telemetry, steps)), ""],
  ];
  byId("tiles").replaceChildren(...tiles.map(([name, value, note]) =>
    element("div", {}, element("dt", {}, name), element("dd", {}, value, element("small", {}, note)))));
  byId("in-flight-now").textContent = count(now.in_flight);
  byId("calls-now").textContent = count(now.calls_per_s);
  byId("tokens-now").textContent = count(now.tokens_per_s);
}

function evaluationTiles(evaluation) {
  if (!evaluation) return [];
  const { report, num_rows: numRows, num_wanted: numWanted } = evaluation;
  const passed = Object.entries(report.pass_at ?? {}).slice(-1).map(([k, estimate]) => [`pass@${k}`, share(estimate.mean), ""]);
  return [
    ["Reward", figure(report.reward?.mean), ""],
    ...(report.success ? [["Success", share(report.success.mean), ""]] : []),
    ...passed,
    ["Rollouts", count(numRows), ` of at most ${count(numWanted)}`],
    ["Tasks", count(report.num_tasks), ""],
  ];
}

function secondsLeft(run, steps, last) {
  const [from, to] = [steps.at(-ETA_STEPS) ?? steps[0], steps.at(-1)];
  if (!run.num_steps || !to || to.step === from.step) return null;
  return ((run.num_steps - 1 - last.step) * (to.time_s - from.time_s)) / (to.step - from.step);
}

function secondsTaken(telemetry, steps) {
  const times = [telemetry[0], telemetry.at(-1), steps[0], steps.at(-1)].filter(Boolean).map((row) => row.time_s);
  return times.length ? Math.max(...times) - Math.min(...times) : null;
}

function drawAges({ learning, run }) {
  const shares = (histogram) => {
    const total = Object.values(histogram).reduce((a, b) => a + b, 0);
    return (age) => (total ? (histogram[age] ?? 0) / total : 0);
  };
  const [whole, recent] = [shares(learning.ages), shares(learning.recent_ages)];
  const oldest = Math.max(run.max_staleness ?? 0, ...Object.keys(learning.ages).map(Number));
  const rows = Array.from({ length: oldest + 1 }, (_, age) => element("tr", {},
    element("th", { scope: "row" }, age),
    element("td", { class: "bar" },
      element("span", { "--share": percent(whole(age)) }),
      element("span", { class: "recent", "--share": percent(recent(age)) })),
    element("td", { class: "number", title: `last steps: ${percent(recent(age))}` }, percent(whole(age)))));
  const drops = Object.entries(learning.drops).map(([reason, num]) => `${count(num)} ${reason}`);
  const note = `Thick: whole run. Thin: last 20 steps. Rollouts dropped: ${drops.join(", ") || "none"}.`;
  byId("ages").replaceChildren(element("caption", {}, note), element("tbody", {}, ...rows));
}

function drawFleet({ run, fleet }) {
  const { router, processes, time_s: seenS, worker_table: workerTable } = fleet;
  const { engines = [], queue = {}, num_done: numDone = 0 } = router ?? {};
  const number = (value) => [value, "number"];
  fillTable(byId("engines"),
    ["URL", "Phase", number("Policy version"), number("Running"), number("Waiting")],
    engines.map((engine) => [engine.url, [engine.phase, engine.phase.toLowerCase() === "ready" ? "good" : ""],
      number(count(engine.policy_version)), number(count(engine.num_running)), number(count(engine.num_waiting))]));
  const kinds = workerTable.columns.map(([, isNumber]) => (isNumber ? "number" : ""));
  fillTable(byId("workers"),
    workerTable.columns.map(([title], at) => [title[0].toUpperCase() + title.slice(1), kinds[at]]),
    workerTable.rows.map((row) => row.map((cell, at) => [cell, kinds[at]])));
  const waiting = Object.entries(queue).map(([state, num]) => `${count(num)} ${state}`);
  // What has ended is not told as alive.
  const seen = !["waiting", "running"].includes(run.phase) ? `As last seen at ${new Date(1000 * seenS).toLocaleTimeString()}. ` : "";
  byId("queue").textContent = router
    ? `${seen}Groups: ${[...waiting, `${count(numDone)} done`].join(", ")}. Processes: ${processes.length}.`
    : "The router has not been heard yet.";
}
