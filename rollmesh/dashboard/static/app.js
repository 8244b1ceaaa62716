// Joins the event stream to the views; draws at most once per frame.

import { Charts } from "./charts.js";
import { byId } from "./dom.js";
import { drawFigures } from "./figures.js";
import { drawResults } from "./results.js";
import { Rollouts } from "./rollouts.js";
import { Store } from "./store.js";

const REDRAW_MS = 1000; // what was held back, such as the list under the pointer, gets its turn
const EVENTS = ["state", "run", "steps", "evaluation", "telemetry", "trajectories"];

const store = new Store();
const charts = new Charts(byId);
const rollouts = new Rollouts();
let isDrawing = false;

function draw() {
  isDrawing = false;
  drawFigures(store);
  drawResults(store);
  charts.draw(store);
  rollouts.draw(store, performance.now());
}

function drawSoon() {
  if (isDrawing) return;
  isDrawing = true;
  requestAnimationFrame(draw);
}

function follow() {
  const source = new EventSource("/events");
  for (const name of EVENTS) {
    source.addEventListener(name, (event) => {
      store.apply(name, JSON.parse(event.data));
      drawSoon();
    });
  }
  source.addEventListener("error", () => {
    byId("phase").textContent = "disconnected";
    byId("phase").className = "phase disconnected";
  });
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawSoon);
setInterval(drawSoon, REDRAW_MS);
addEventListener("hashchange", () => rollouts.openNamed());
rollouts.openNamed();
follow();
