"""Engines and publishers that are killed during weight updates: both machines on one clock."""

import pytest

from rollmesh.trainer.weights.publisher import PhaseResult, UpdatePhase
from rollmesh.wire.fleet import EnginePhase
from tests.unit.trainer.weights.publisher_world import A, B, Mesh, target


@pytest.mark.parametrize(("lease_s", "takes_s"), [(30.0, 7.0), (5.0, 7.0)])
def test_an_engine_that_is_killed_as_its_update_begins_has_the_weights_once_it_answers(
    lease_s: float, takes_s: float
) -> None:
    mesh = Mesh(A, lease_s=lease_s)
    mesh.run(1.0)
    engine = mesh.engines[A]
    engine.restart()
    engine.is_starting = True
    mesh.publish(target(1))
    mesh.run(5.0)
    if lease_s > 5.0:
        [look] = mesh.calls
        assert look.phase is UpdatePhase.DRAINING
        mesh.calls.clear()
        mesh.publish(PhaseResult(A, look.serial, False, "no answer within 5 s"))
    mesh.run(takes_s - 5.0)
    assert mesh.phase() is EnginePhase.UPDATING
    engine.is_starting = False
    mesh.run(0.5)
    assert (mesh.phase(), mesh.policy_version(), engine.weights) == (EnginePhase.READY, 1, 1)


def test_an_engine_that_refuses_at_once_is_not_retried_at_once() -> None:
    mesh = Mesh(A)
    mesh.run(1.0)
    mesh.engines[A].broken = UpdatePhase.LOADING
    mesh.publish(target(1))
    mesh.run(5.0)
    assert [phase for _, phase in mesh.was_called].count(UpdatePhase.LOADING) == 3


def test_a_publication_is_not_over_while_a_possibly_dead_publisher_is_ahead() -> None:
    mesh = Mesh(A, B)
    mesh.run(1.0)
    mesh.publish(target(30))
    mesh.run(1.0)
    mesh.kill()
    mesh.publish(target(1))
    mesh.run(8.0)
    assert [report.policy_version for report in mesh.reports] == [30]
    mesh.run(5.0)
    assert [(each.policy_version, each.updated) for each in mesh.reports[1:]] == [(1, (A, B))]
    assert mesh.superseded == []
    assert (mesh.phase(), mesh.policy_version(), mesh.engines[A].weights) == (
        EnginePhase.READY,
        1,
        1,
    )
