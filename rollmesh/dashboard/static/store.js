// What the page knows of the run: a `state` event replaces it, the others add to it.
// Its size is bounded: the server sends a thinned `state` before its rows grow past their limit.

const MAX_LISTED = 50;

/** Whether the last train step knew which rollouts succeeded. */
export const isSuccessKnown = ({ steps }) => typeof steps.at(-1)?.success === "number";

/** Whether success is known and is more than the reward, as it is where rewards are not 0 or 1. */
export const hasOwnSuccess = (store) => isSuccessKnown(store) && store.steps.some((row) => row.success !== row.reward);

export class Store {
  run = {};
  steps = [];
  learning = { last: null, ages: {}, recent_ages: {}, drops: {}, failed: [] };
  evaluation = null;
  telemetry = [];
  fleet = { processes: [], router: null, worker_table: { columns: [], rows: [] } };
  trajectories = [];

  apply(name, data) {
    if (name === "state") Object.assign(this, data);
    else if (name === "run") this.run = data;
    else if (name === "steps") {
      this.steps.push(...data.rows);
      this.learning = data.learning;
    } else if (name === "evaluation") this.evaluation = data;
    else if (name === "telemetry") {
      this.telemetry.push(...data.rows);
      this.fleet = data.fleet;
    } else if (name === "trajectories") this.#list(data);
  }

  #list(newest) {
    const ids = new Set(newest.map((each) => each.rollout_id));
    const older = this.trajectories.filter((each) => !ids.has(each.rollout_id));
    this.trajectories = [...newest, ...older].slice(0, MAX_LISTED);
  }
}
