"""Whether an engine scores the probe as the weights do that it was brought.

Owns what differs too much, and how an engine is found out that kept the weights it had. Invariant:
what cannot be told, such as a gap of NaN, is a no. Pure; driven by publisher.py.
"""

from rollmesh.trainer.weights.events import Probe


def why_not(
    logprobs: tuple[float, ...], probe: Probe, previous: Probe | None, tolerance: float
) -> str:
    """Why these scores are not those of `probe`'s weights, or ''; `previous` is what the weights
    before say, where the engine may have kept them."""
    if len(logprobs) != len(probe.logprobs):
        return f"scored {len(logprobs)} tokens of {len(probe.logprobs)}"
    gap = mean_gap(logprobs, probe.logprobs)
    # Written so that a gap of NaN fails.
    if not gap <= tolerance:
        return f"its log-probs differ from the trainer's by {gap:.3f} on average"
    if previous and previous.token_ids == probe.token_ids:
        drift = mean_gap(probe.logprobs, previous.logprobs)
        # Noise moves both distances alike, weights that did not change only one of them.
        if gap > mean_gap(logprobs, previous.logprobs) + drift / 2:
            return "it still scores as the version before"
    return ""


def mean_gap(left: tuple[float, ...], right: tuple[float, ...]) -> float:
    """Mean absolute difference of two equally long, non-empty sequences."""
    return sum(abs(a - b) for a, b in zip(left, right, strict=True)) / max(1, len(left))
