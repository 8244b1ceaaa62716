"""Judge whether an engine holds the weights that it was sent, by its scores of the probe.

- Scores that cannot be compared, such as NaN, are wrong. So are scores that are further from the
  trainer's than the tolerance.
- An engine that ignores updates may stay within the tolerance. It is compared with the last version
  that it was proved to hold, so that the drift of many small steps adds up.
- Drift below the engine's own noise proves nothing: then the version that the engine reports
  counts.
- An engine that slept may wake with the published weights by itself, and is given a moment for it.
"""

import msgspec

from rollmesh.wire.fleet import EnginePhase, EngineRow

LEAST_NOISE = 1e-5
"""Mean difference of log-probs that float32 arithmetic alone may cause."""


class Probe(msgspec.Struct, frozen=True):
    """A fixed text and its log-probs under the new weights, computed by the trainer."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Log-probs of all tokens but the first."""
    coarse: tuple[float, ...] = ()
    """`logprobs` with all weights rounded to bfloat16, as most engines hold them; () if unknown."""


WAKING_READS = 3
"""Fleet tables, read one per second, after which the publisher updates an engine that is still
waking."""


class WakingEngines:
    """Engines that are waking from sleep and may already hold the published weights.

        awake --ASLEEP--> asleep --JOINING--> waking --READY, or WAKING_READS tables later--> awake

    On a shared fleet the run's coordinator wakes its engines, loads the last published version and
    proves it. The publisher leaves such an engine alone, unless it is still not ready after
    WAKING_READS.
    """

    def __init__(self) -> None:
        self._reads_left: dict[str, int] = {}

    def observe(self, table: tuple[EngineRow, ...], verified: dict[str, int]) -> None:
        """Process a fleet table; record in `verified` the engines that became ready by
        themselves."""
        for row in table:
            if row.phase is EnginePhase.ASLEEP:
                self._reads_left[row.url] = WAKING_READS
            elif row.url in self._reads_left:
                self._reads_left[row.url] -= 1
                if row.phase is EnginePhase.READY:
                    verified[row.url] = row.policy_version
                if row.phase is EnginePhase.READY or not self._reads_left[row.url]:
                    del self._reads_left[row.url]

    def is_waking(self, row: EngineRow) -> bool:
        """Return whether the engine may still become ready by itself."""
        return row.phase is EnginePhase.JOINING and row.url in self._reads_left


class WeightProof(msgspec.Struct, frozen=True):
    """The last weights that an engine was proved to hold."""

    policy_version: int
    probe: Probe
    scores: tuple[float, ...]
    """The engine's scores under these weights."""
    noise: float
    """The largest mean difference between its scores and the trainer's while its weights were
    beyond doubt."""


class ProbeVerdict(msgspec.Struct, frozen=True):
    """The judgement of an engine's scores."""

    proof: WeightProof | None = None
    """The proof to compare the next scores with; None if these are `wrong`."""
    wrong: str = ""
    """Why these are not the scores of the weights."""
    stuck: str = ""
    """Why the engine seems to have kept older weights, although its scores are within the
    tolerance."""


def judge(
    scores: tuple[float, ...],
    policy_version: int,
    probe: Probe,
    proof: WeightProof | None,
    tolerance: float,
) -> ProbeVerdict:
    """Judge an engine's `scores` of `probe`, which belongs to the weights `policy_version`."""
    if len(scores) != len(probe.logprobs):
        return ProbeVerdict(wrong=f"scored {len(scores)} tokens of {len(probe.logprobs)}")
    gap = mean_gap(scores, probe.logprobs)
    # Written so that a gap of NaN fails.
    if not gap <= tolerance:
        finding = f"its log-probs differ from the trainer's by {gap:.3g} on average"
        return ProbeVerdict(wrong=f"{finding}, more than {tolerance:.3g}")
    noise = max(LEAST_NOISE, _least_gap(scores, probe))
    if proof is None or proof.probe.token_ids != probe.token_ids:
        return ProbeVerdict(WeightProof(policy_version, probe, scores, noise))
    drift = _drift(proof.probe, probe)
    if drift <= proof.noise:
        return ProbeVerdict(proof)
    moved = mean_gap(scores, proof.scores)
    if moved < drift / 2:
        finding = (
            f"the trainer's log-probs moved by {drift:.3g} since version {proof.policy_version}"
        )
        return ProbeVerdict(
            proof, stuck=f"{finding}, its own by {moved:.3g}: it seems to ignore updates"
        )
    if gap > mean_gap(scores, proof.probe.logprobs):
        return ProbeVerdict(proof)  # it moved, but not to these weights: more drift will decide
    return ProbeVerdict(WeightProof(policy_version, probe, scores, max(noise, proof.noise)))


def mean_gap(left: tuple[float, ...], right: tuple[float, ...]) -> float:
    """Mean absolute difference of two equally long sequences; 0 for empty ones."""
    return sum(abs(a - b) for a, b in zip(left, right, strict=True)) / max(1, len(left))


def _least_gap(scores: tuple[float, ...], probe: Probe) -> float:
    """The gap to the probe at the precision that fits the engine better."""
    gap = mean_gap(scores, probe.logprobs)
    return min(gap, mean_gap(scores, probe.coarse)) if probe.coarse else gap


def _drift(before: Probe, now: Probe) -> float:
    """How far the weights moved the probe, at the precision at which they moved it less.

    A step may move float32 weights and leave bfloat16 ones unchanged. An engine that holds the
    latter then correctly scores as before.
    """
    drift = mean_gap(before.logprobs, now.logprobs)
    if before.coarse and now.coarse:
        return min(drift, mean_gap(before.coarse, now.coarse))
    return drift
