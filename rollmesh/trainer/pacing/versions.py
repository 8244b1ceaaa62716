"""After how many train steps each policy version was made, and so how old tokens are.

Invariant: of more versions than the age bound needs the oldest are forgotten; a version that is not
here is of no life of this run, or of one long past. Driven by course.py, read by the train loop.
"""

from collections.abc import Collection, Iterable, Mapping

from rollmesh.serve.client.samples import Sample

SPARE_VERSIONS = 1000
"""So many more are known than the age bound needs: of what comes later than that nobody remembers
which step it is of."""


class VersionSteps:
    """See the module."""

    def __init__(self, max_staleness: int) -> None:
        self._max_known = max_staleness + SPARE_VERSIONS
        self._steps = {0: 0}

    @property
    def steps(self) -> Mapping[int, int]:
        """By version, oldest first."""
        return self._steps

    def add(self, steps: Mapping[int, int]) -> None:
        """Of these versions, too."""
        self._steps |= steps
        while len(self._steps) > self._max_known:
            del self._steps[next(iter(self._steps))]

    def named(self, step: int) -> int | None:
        """The newest version that was made after `step` steps; None where none was."""
        return next((each for each, of in reversed(self._steps.items()) if of == step), None)

    def made_before(self, step: int) -> frozenset[int]:
        """Versions that fewer steps had made."""
        return frozenset(each for each, made in self._steps.items() if made < step)

    def foreign(self, policy_versions: Collection[int]) -> set[int]:
        """Those that are not of this run."""
        return set(policy_versions) - self._steps.keys()

    def oldest_step(self, policy_versions: Collection[int]) -> int:
        """Steps that had made the oldest of them."""
        return min(self._steps[each] for each in policy_versions)

    def newest_step(self, policy_versions: Collection[int]) -> int:
        """The same of the newest."""
        return max(self._steps[each] for each in policy_versions)

    def age(self, samples: Iterable[Sample], step: int) -> int:
        """Train steps between the weights of the oldest trained token and `step`."""
        return step - self.oldest_step(versions_of(samples))

    def age_of(self, policy_versions: Iterable[int], step: int) -> int | None:
        """The same of any tokens; None where there is none, or nobody knows of which step it is."""
        made = map(self._steps.get, policy_versions)
        known = [each for each in made if each is not None]
        return step - min(known) if known else None


def versions_of(samples: Iterable[Sample]) -> frozenset[int]:
    """The policy versions of the trained tokens."""
    trained = (set(s.policy_versions[s.loss_mask].tolist()) for s in samples)
    return frozenset[int]().union(*trained)


def spans_versions(sample: Sample) -> bool:
    """Whether more than one policy version sampled its trained tokens."""
    versions = sample.policy_versions[sample.loss_mask]
    return bool(versions.min() != versions.max())
