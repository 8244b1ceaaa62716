"""Engines that were asleep are updated only if they do not become ready by themselves."""

from rollmesh.trainer.weights.publisher import UpdatePhase
from rollmesh.wire.fleet import EnginePhase, SleepEngine, WakeEngine
from rollmesh.wire.machine import Received
from tests.unit.trainer.weights.publisher_world import A, B, Mesh, target

COORDINATOR = b"coordinator"


def published(policy_version: int) -> Mesh:
    """A mesh in which A is asleep and B has been brought to the version."""
    mesh = Mesh(A, B)
    mesh.run(1.0)
    mesh.tend_fleet(Received(COORDINATOR, SleepEngine(1, A, 100.0)))
    mesh.publish(target(policy_version))
    mesh.run(2.0)
    mesh.was_called.clear()
    return mesh


def test_a_publication_does_not_wait_for_engines_that_sleep() -> None:
    mesh = published(1)
    [report] = mesh.reports
    assert report.updated == (B,)
    assert report.failed == ()
    assert mesh.phase(A) is EnginePhase.ASLEEP


def test_engine_that_wakes_with_the_published_weights_is_not_updated() -> None:
    mesh = published(1)
    mesh.engines[A].label = mesh.engines[A].weights = 1
    mesh.tend_fleet(Received(COORDINATOR, WakeEngine(2, A, 1)))
    mesh.run(6.0)
    assert (mesh.phase(A), mesh.policy_version(A)) == (EnginePhase.READY, 1)
    assert mesh.was_called == []
    mesh.publish(target(2))
    mesh.run(3.0)
    assert set(mesh.reports[-1].updated) == {A, B}


def test_engine_that_wakes_with_older_weights_is_updated() -> None:
    mesh = published(1)
    mesh.tend_fleet(Received(COORDINATOR, WakeEngine(2, A, 0)))
    mesh.run(6.0)
    assert (mesh.phase(A), mesh.policy_version(A)) == (EnginePhase.READY, 1)
    assert (A, UpdatePhase.LOADING) in mesh.was_called


def test_engine_that_wakes_with_older_weights_does_not_serve_after_a_newer_publication_ended() -> (
    None
):
    mesh = Mesh(A)
    mesh.run(1.0)
    mesh.publish(target(1))
    mesh.run(2.0)
    mesh.tend_fleet(Received(COORDINATOR, SleepEngine(1, A, 100.0)))
    mesh.publish(target(2))
    mesh.run(2.0)
    assert (mesh.reports[-1].policy_version, mesh.reports[-1].updated) == (2, ())
    # Its coordinator had loaded version 1 before the folder of version 2 was whole.
    mesh.tend_fleet(Received(COORDINATOR, WakeEngine(2, A, 1)))
    for _ in range(100):
        mesh.run(0.05)
        assert mesh.phase() is not EnginePhase.READY or mesh.policy_version() == 2
    assert mesh.phase() is EnginePhase.READY
