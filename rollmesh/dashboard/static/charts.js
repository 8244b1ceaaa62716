// The line charts, drawn by uPlot. A chart is rebuilt when its lines or the theme change,
// and otherwise only given new data. Its key names the lines and shows the values under the
// pointer, or the latest.

import { element } from "./dom.js";
import { clock, count, isNumber, share } from "./format.js";

const MEAN_STEPS = 10;
const PALETTE_SIZE = 8;
const TIME_STEPS_S = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800, 86400];
const NONE = "\u2013";

const ink = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function axis(options) {
  return {
    stroke: ink("--muted"),
    grid: { stroke: ink("--grid"), width: 1 },
    ticks: { show: false },
    font: "11px system-ui, sans-serif",
    ...options,
  };
}

/** A plot in `box`; `describe(labels)` gives uPlot's options from the present theme. */
class Chart {
  #plot = null;
  #drawn = "";
  #values = [];

  constructor(box, key, describe) {
    this.box = box;
    this.key = key;
    this.describe = describe;
    new ResizeObserver(() => this.#plot?.setSize(this.#size())).observe(box);
  }

  draw(labels, data) {
    const theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
    const wanted = [theme, ...labels].join();
    if (this.#plot && this.#drawn === wanted) this.#plot.setData(data);
    else this.#build(wanted, labels, data);
    this.#tell(this.#plot.cursor.idx);
  }

  #build(wanted, labels, data) {
    this.#plot?.destroy();
    this.#drawn = wanted;
    const options = {
      ...this.#size(),
      padding: [8, 8, 0, 0],
      legend: { show: false },
      cursor: { show: this.key !== null, drag: { x: false, y: false } },
      hooks: { setCursor: [(plot) => this.#tell(plot.cursor.idx)] },
      ...this.describe(labels),
    };
    this.#plot = new window.uPlot(options, data, this.box);
    if (this.key) this.#makeKey();
  }

  #makeKey() {
    this.#values = this.#plot.series.map(() => element("output", {}));
    this.key.replaceChildren(...this.#plot.series.map(({ label, tint }, at) =>
      element("span", { class: at ? "line" : "at", "--tint": tint }, `${label} `, this.#values[at])));
  }

  #tell(index) {
    this.#values.forEach((box, at) => {
      const { tell } = this.#plot.series[at];
      const column = this.#plot.data[at];
      const value = column[index ?? column.length - 1];
      box.textContent = isNumber(value) ? tell(value) : NONE;
    });
  }

  #size() {
    return { width: this.box.clientWidth, height: this.box.clientHeight };
  }
}

/** The mean of each value and up to MEAN_STEPS - 1 before it. */
export function movingMean(values) {
  let sum = 0;
  return values.map((value, at) => {
    sum += value - (at >= MEAN_STEPS ? values[at - MEAN_STEPS] : 0);
    return sum / Math.min(at + 1, MEAN_STEPS);
  });
}

function successOptions() {
  const [accent, soft, warm] = [ink("--accent"), ink("--accent-soft"), ink("--warm")];
  const dots = { show: true, size: 5, width: 0, fill: `${accent}88` };
  return {
    scales: { x: { time: false }, y: { range: [0, 1] } },
    axes: [
      axis({ size: 24 }),
      axis({ size: 34, values: (_, ticks) => ticks.map((tick) => tick.toFixed(1)) }),
    ],
    series: [
      { label: "step", tell: count },
      { label: "success", tell: share, tint: `${accent}88`, stroke: soft, width: 1, points: dots },
      { label: `mean of ${MEAN_STEPS}`, tell: share, tint: accent, stroke: accent, width: 2.5, points: { show: false } },
      { label: "untrained", tell: share, tint: warm, stroke: warm, width: 1.5, dash: [6, 4], points: { show: false } },
    ],
  };
}

function timeOptions(labels) {
  const series = labels.map((label, at) => {
    const tint = ink(`--series-${at % PALETTE_SIZE}`);
    const fill = labels.length === 1 ? ink("--accent-soft") : null;
    return { label, tell: count, tint, stroke: tint, fill, width: 1.75, spanGaps: true, points: { show: false } };
  });
  return {
    scales: { x: { time: false }, y: { range: (_, _low, high) => [0, high > 0 ? high * 1.1 : 1] } },
    axes: [
      axis({ size: 22, space: 60, incrs: TIME_STEPS_S, values: (_, ticks) => ticks.map(clock) }),
      axis({ size: 40, space: 26, values: (_, ticks) => ticks.map(count) }),
    ],
    series: [{ label: "at", tell: clock }, ...series],
  };
}

export class Charts {
  constructor(byId) {
    const small = (id) => new Chart(byId(id), null, timeOptions);
    this.success = new Chart(byId("success"), byId("success-key"), successOptions);
    this.memory = new Chart(byId("memory"), byId("memory-key"), timeOptions);
    this.inFlight = small("in-flight");
    this.calls = small("calls");
    this.tokens = small("tokens");
  }

  draw(store) {
    const values = store.steps.map((row) => row.success);
    const baseline = values.map(() => store.run.success_untrained ?? null);
    this.success.draw([], [store.steps.map((row) => row.step), values, movingMean(values), baseline]);
    this.#drawTelemetry(store.telemetry, store.run.started_s ?? 0);
  }

  #drawTelemetry(rows, startedS) {
    const times = rows.map((row) => row.time_s - startedS);
    const column = (name, scale = 1) => rows.map((row) => (name in row ? row[name] / scale : null));
    const names = [...new Set(rows.flatMap(Object.keys))].filter((name) => name.startsWith("rss/")).sort();
    const roles = names.map((name) => name.slice("rss/".length));
    this.memory.draw(roles, [times, ...names.map((name) => column(name, 2 ** 20))]);
    this.inFlight.draw(["in flight"], [times, column("in_flight")]);
    this.calls.draw(["calls/s"], [times, column("calls_per_s")]);
    this.tokens.draw(["tokens/s"], [times, column("tokens_per_s")]);
  }
}
