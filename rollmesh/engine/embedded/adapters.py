"""Low-rank adapters over a model's weights, applied token by token, and which of them are loaded.

    y = W x + SCALE * B A x        A [rank, in], B [out, rank]

Invariants: an adapter never changes the model's weights, so tokens of several, and of none, share a
step; one that a request holds outlives its name; each load has a key of its own, so that no prefix
is shared between two. Source: Hu et al. 2021, "LoRA". Driven by the routes, which load and forget,
and by the model.

Shapes: N tokens of a step, n those of one adapter, W what goes into a projection, R the ranks of a
fused projection's adapters together.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from rollmesh.core.errors import EngineRefused


@dataclass(frozen=True, slots=True)
class Pair:
    """What is added to one fused projection."""

    down_RW: Tensor
    up: Tensor
    """(out, R), with the scale in it; zero where a part of the projection is not adapted."""


@dataclass(frozen=True, slots=True)
class LayerAdapter:
    """One layer's, named as the model's projections; None where nothing is added."""

    qkv: Pair | None = None
    output: Pair | None = None
    gate_up: Pair | None = None
    down: Pair | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """One adapter in memory."""

    name: str
    folder: str
    key: str
    """Of this load: isolates its prefixes."""
    layers: tuple[LayerAdapter, ...]


Applied = tuple[Adapter, Tensor | None]
"""An adapter and the places of its tokens among N; None for all of them."""


def project(
    input_NW: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    deltas: Sequence[tuple[Pair | None, Tensor | None]],
) -> Tensor:
    """A linear layer, with what each adapter adds to its own tokens."""
    out = functional.linear(input_NW, weight, bias)
    for pair, places_n in deltas:
        if pair is None:
            continue
        own_nW = input_NW if places_n is None else input_NW.index_select(0, places_n)
        added = functional.linear(functional.linear(own_nW, pair.down_RW), pair.up)
        if places_n is None:
            out += added
        else:
            out.index_add_(0, places_n, added)
    return out


class Shelf:
    """The adapters that are loaded, by name; used from the event loop."""

    def __init__(self) -> None:
        self._adapters: dict[str, Adapter] = {}

    def find(self, name: str) -> Adapter:
        """EngineRefused, in SGLang's words, for a name that is not there."""
        adapter = self._adapters.get(name)
        if adapter is None:
            told = f"Got LoRA adapter that has never been loaded: {name}"
            raise EngineRefused(f"{told}. All loaded adapters: {sorted(self._adapters)}.")
        return adapter

    def put(self, adapter: Adapter) -> None:
        """Requests may name it from now on; EngineRefused if another has its name."""
        if adapter.name in self._adapters:
            raise EngineRefused(f"LoRA adapter {adapter.name} is loaded already; unload it first")
        self._adapters[adapter.name] = adapter

    def forget(self, name: str) -> None:
        """Requests that have it keep it to their end; EngineRefused if it is not there."""
        del self._adapters[self.find(name).name]

    def folders(self) -> dict[str, str]:
        """Of those that are loaded, by name."""
        return {name: adapter.folder for name, adapter in self._adapters.items()}
