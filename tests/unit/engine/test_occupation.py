"""Names of weights that say whether their engine has its memory."""

import pytest

from rollmesh.engine.answers import UNVERSIONED, policy_version_of
from rollmesh.engine.occupation import Occupation, name_of, told_by


@pytest.mark.parametrize("occupation", list(Occupation))
@pytest.mark.parametrize("weights", ["7", "default", "moving-target"])
def test_a_name_says_how_the_engine_is_and_what_its_weights_were(
    occupation: Occupation, weights: str
) -> None:
    if occupation is Occupation.HELD and weights.startswith("moving-"):
        return  # nobody publishes under such a name
    assert told_by(name_of(occupation, weights)) == (occupation, weights)


def test_weights_whose_memory_is_gone_have_no_version() -> None:
    for occupation in (Occupation.MOVING, Occupation.RELEASED):
        assert policy_version_of(name_of(occupation, "7")) == UNVERSIONED
