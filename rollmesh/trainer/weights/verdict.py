"""Judge, by an engine's scores of the probe, whether it holds the weights that it was sent.

- Scores that cannot be compared, such as NaN, are wrong. So are scores that are further from the
  trainer's than the tolerance.
- An engine that ignores updates may stay within the tolerance. It is compared with the last version
  that it was proved to hold, so that the drift of many small steps adds up.
- Drift below the engine's own noise proves nothing: then the version that the engine names counts.
"""

import msgspec

from rollmesh.trainer.weights.events import Probe

LEAST_NOISE = 1e-5
"""Mean difference of log-probs that float32 alone may cause."""


class Proof(msgspec.Struct, frozen=True):
    """The last weights that an engine was proved to hold."""

    policy_version: int
    probe: Probe
    scores: tuple[float, ...]
    """The engine's own, under these weights."""
    noise: float
    """How far its scores were from the trainer's when they were beyond doubt: the largest mean."""


class Verdict(msgspec.Struct, frozen=True):
    """The judgement of an engine's scores."""

    proof: Proof | None = None
    """To compare the next scores with; None where these are `wrong`."""
    wrong: str = ""
    """Why these are not the scores of the weights."""
    stuck: str = ""
    """Why the engine seems to have kept older weights, although its scores are within the
    tolerance."""


def judge(
    scores: tuple[float, ...],
    policy_version: int,
    probe: Probe,
    proof: Proof | None,
    tolerance: float,
) -> Verdict:
    """Judge an engine's `scores` of `probe`, which is of the weights `policy_version`."""
    if len(scores) != len(probe.logprobs):
        return Verdict(wrong=f"scored {len(scores)} tokens of {len(probe.logprobs)}")
    gap = mean_gap(scores, probe.logprobs)
    # Written so that a gap of NaN fails.
    if not gap <= tolerance:
        told = f"its log-probs differ from the trainer's by {gap:.3g} on average"
        return Verdict(wrong=f"{told}, more than {tolerance:.3g}")
    noise = max(LEAST_NOISE, _least_gap(scores, probe))
    if proof is None or proof.probe.token_ids != probe.token_ids:
        return Verdict(Proof(policy_version, probe, scores, noise))
    drift = _drift(proof.probe, probe)
    if drift <= proof.noise:
        return Verdict(proof)
    moved = mean_gap(scores, proof.scores)
    if moved < drift / 2:
        told = f"the trainer's log-probs moved by {drift:.3g} since version {proof.policy_version}"
        return Verdict(proof, stuck=f"{told}, its own by {moved:.3g}: it seems to ignore updates")
    if gap > mean_gap(scores, proof.probe.logprobs):
        return Verdict(proof)  # it moved, but not to these weights: more drift will tell
    return Verdict(Proof(policy_version, probe, scores, max(noise, proof.noise)))


def mean_gap(left: tuple[float, ...], right: tuple[float, ...]) -> float:
    """Mean absolute difference of two equally long sequences; 0 for empty ones."""
    return sum(abs(a - b) for a, b in zip(left, right, strict=True)) / max(1, len(left))


def _least_gap(scores: tuple[float, ...], probe: Probe) -> float:
    """The gap to the probe at the precision that fits the engine better."""
    gap = mean_gap(scores, probe.logprobs)
    return min(gap, mean_gap(scores, probe.coarse)) if probe.coarse else gap


def _drift(before: Probe, now: Probe) -> float:
    """How far the weights moved the probe, by the precision at which they moved it less.

    A step may move float32 weights and leave bfloat16 ones as they were. An engine that holds the
    latter then rightly scores as before.
    """
    drift = mean_gap(before.logprobs, now.logprobs)
    if before.coarse and now.coarse:
        return min(drift, mean_gap(before.coarse, now.coarse))
    return drift
