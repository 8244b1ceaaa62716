"""The step machines that a simulation joins; a test may put a broken one in a real one's place.

Invariant: the defaults are the machines that the processes run. Driven by mesh.py, which hands them
to the nodes.
"""

import msgspec

from rollmesh.engine.fleet import Fleet
from rollmesh.runtime.generation import GenerationMachine
from rollmesh.serve.client.sink import Sink
from rollmesh.serve.router.ledger import Ledger


class Machines(msgspec.Struct, frozen=True, kw_only=True):
    """What nodes build themselves from."""

    ledger: type[Ledger] = Ledger
    fleet: type[Fleet] = Fleet
    sink: type[Sink] = Sink
    generation: type[GenerationMachine] = GenerationMachine


REAL = Machines()
