// The line charts, drawn by uPlot. A chart is rebuilt when its lines or the theme change,
// and otherwise only given new data. Its key names the lines and shows the values under the
// pointer, or the latest.

import { element } from "./dom.js";
import { clock, count, figure, isNumber, meanOf, share } from "./format.js";
import { hasOwnSuccess } from "./store.js";

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

/** The mean of each value and up to MEAN_STEPS - 1 before it; null where there is no value. */
export function movingMean(values) {
  return values.map((value, at) => (isNumber(value) ? meanOf(values.slice(Math.max(0, at + 1 - MEAN_STEPS), at + 1)) : null));
}

/** The range of an axis: 0 to 1 for shares and the like, else that of the data. */
const rewardRange = (_, low, high) => {
  if (low === null || (low >= 0 && high <= 1 && high > 0.3)) return [0, 1];
  const [bottom, top] = [Math.min(low, 0), Math.max(high, 0)];
  const margin = 0.08 * (top - bottom) || 1;
  return [bottom < 0 ? bottom - margin : 0, top > 0 ? top + margin : 0];
};

const curveOptions = (name, tell, range) => () => {
  const [accent, soft, warm] = [ink("--accent"), ink("--accent-soft"), ink("--warm")];
  const dots = { show: true, size: 5, width: 0, fill: `${accent}88` };
  return {
    scales: { x: { time: false }, y: { range } },
    axes: [
      axis({ size: 24 }),
      axis({ size: 44, values: (_, ticks) => ticks.map((tick) => String(Number(tick.toPrecision(3)))) }),
    ],
    series: [
      { label: "step", tell: count },
      { label: name, tell, tint: `${accent}88`, stroke: soft, width: 1, points: dots },
      { label: `mean of ${MEAN_STEPS}`, tell, tint: accent, stroke: accent, width: 2.5, points: { show: false } },
      { label: "untrained", tell, tint: warm, stroke: warm, width: 1.5, dash: [6, 4], points: { show: false } },
    ],
  };
};

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
    this.reward = new Chart(byId("reward"), byId("reward-key"), curveOptions("reward", figure, rewardRange));
    this.success = new Chart(byId("success"), byId("success-key"), curveOptions("success", share, [0, 1]));
    this.memory = new Chart(byId("memory"), byId("memory-key"), timeOptions);
    this.inFlight = small("in-flight");
    this.calls = small("calls");
    this.tokens = small("tokens");
  }

  draw(store) {
    if (!store.run.is_eval) {
      this.#drawCurve(this.reward, store, "reward");
      if (hasOwnSuccess(store)) this.#drawCurve(this.success, store, "success");
    }
    this.#drawTelemetry(store.telemetry, store.run.started_s ?? 0);
  }

  #drawCurve(chart, { run, steps }, name) {
    const values = steps.map((row) => row[name] ?? null);
    const baseline = values.map(() => run[`${name}_untrained`] ?? null);
    chart.draw([], [steps.map((row) => row.step), values, movingMean(values), baseline]);
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
