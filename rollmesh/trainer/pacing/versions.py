"""The train step after which each policy version was made, and so the ages of tokens.

- Only as many versions are kept as ages need; a version that is missing is not of this run, or very
  old.
"""

from collections.abc import Collection, Iterable, Mapping

from rollmesh.serve.client.samples import Sample

SPARE_VERSIONS = 1000
"""Versions kept beyond those that the age bound needs."""


class VersionSteps:
    """Train steps by policy version."""

    def __init__(self, max_staleness: int) -> None:
        self._max_known = max_staleness + SPARE_VERSIONS
        self._steps = {0: 0}

    @property
    def steps(self) -> Mapping[int, int]:
        """Train steps by version, oldest first."""
        return self._steps

    def add(self, steps: Mapping[int, int]) -> None:
        """Add versions."""
        self._steps |= steps
        while len(self._steps) > self._max_known:
            del self._steps[next(iter(self._steps))]

    def named(self, step: int) -> int | None:
        """The newest version made after `step` steps; None if there is none."""
        return next((each for each, made in reversed(self._steps.items()) if made == step), None)

    def made_before(self, step: int) -> frozenset[int]:
        """Versions made before `step`."""
        return frozenset(each for each, made in self._steps.items() if made < step)

    def foreign(self, policy_versions: Collection[int]) -> set[int]:
        """Versions among these that are not of this run."""
        return set(policy_versions) - self._steps.keys()

    def oldest_step(self, policy_versions: Collection[int]) -> int:
        """The train step of the oldest of these versions."""
        return min(self._steps[each] for each in policy_versions)

    def newest_step(self, policy_versions: Collection[int]) -> int:
        """The train step of the newest of these versions."""
        return max(self._steps[each] for each in policy_versions)

    def age(self, samples: Iterable[Sample], step: int) -> int:
        """Train steps from the weights of the oldest trained token to `step`."""
        return step - self.oldest_step(versions_of(samples))

    def age_of(self, policy_versions: Iterable[int], step: int) -> int | None:
        """Train steps from the oldest of these versions to `step`; None if none is known."""
        made = map(self._steps.get, policy_versions)
        known = [each for each in made if each is not None]
        return step - min(known) if known else None


def versions_of(samples: Iterable[Sample]) -> frozenset[int]:
    """The policy versions of the trained tokens."""
    trained = (set(s.policy_versions[s.loss_mask].tolist()) for s in samples)
    return frozenset[int]().union(*trained)


def spans_versions(sample: Sample) -> bool:
    """Whether more than one policy version sampled the trained tokens."""
    versions = sample.policy_versions[sample.loss_mask]
    return bool(versions.min() != versions.max())
