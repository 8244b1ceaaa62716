"""Which carrier belongs to which `publish.mode`.

Invariant: a new way needs a carrier, its line here and its word in the settings, and nothing else
knows of it. Driven by publish.py.
"""

from rollmesh.core.config import PublishMode
from rollmesh.trainer.weights.carriers.distributed import DistributedCarrier
from rollmesh.trainer.weights.carriers.shipping import Carrier
from rollmesh.trainer.weights.carriers.tensor import TensorCarrier


def carrier_of(mode: PublishMode) -> Carrier | None:
    """None for `disk`, which needs no more than the file that there always is."""
    match mode:
        case "disk":
            return None
        case "tensor":
            return TensorCarrier()
        case "distributed":
            return DistributedCarrier()
