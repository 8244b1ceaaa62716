"""The forward pass of Qwen2, Qwen3 and Llama over a flat batch of tokens, with low-rank adapters.

    y = W x + SCALE * B A x        A [rank, in], B [out, rank]        (LoRA, Hu et al. 2021)

- A Model has the weights of one policy version; an update builds another, so that no step sees half
  of one.
- A token's keys and values are written before any row of its layer attends, so rows of one step may
  read each other's prefixes.
- Adapters never change the weights, so one step may mix several; one that a request uses outlives
  its name, and each load has a key of its own, so that two share no prefix.

Shapes: N tokens of a step, n those of one adapter, B rows (requests) of an attention group, T their
padded new tokens, S their padded context, H query heads, K key-value heads, G = H / K, D head size,
W width of a projection's input, F MLP width, V vocabulary, P memory slots, R the ranks of a fused
projection's adapters together.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from rollmesh.core.errors import EngineRefused, ModelError
from rollmesh.engine.embedded.checkpoint import (
    Architecture,
    read_architecture,
    read_weights,
    rotary_frequencies,
)


@dataclass(frozen=True, slots=True)
class LoraPair:
    """Low-rank addition to one fused projection."""

    down_RW: Tensor
    up: Tensor
    """(out, R), with the scale applied; zero for parts of the projection without adapter."""


@dataclass(frozen=True, slots=True)
class LayerAdapter:
    """Additions to one layer's projections; None for none."""

    qkv: LoraPair | None = None
    output: LoraPair | None = None
    gate_up: LoraPair | None = None
    down: LoraPair | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """One loaded adapter."""

    name: str
    folder: str
    key: str
    """Unique to this load; isolates its prefixes."""
    layers: tuple[LayerAdapter, ...]


AppliedAdapter = tuple[Adapter, Tensor | None]
"""An adapter and the indices of its tokens among N; None for all."""


def project(
    input_NW: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    deltas: Sequence[tuple[LoraPair | None, Tensor | None]],
) -> Tensor:
    """Apply a linear layer, and each adapter to its own tokens."""
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


class AdapterRegistry:
    """Loaded adapters by name; used from the event loop."""

    def __init__(self) -> None:
        self._adapters: dict[str, Adapter] = {}

    def find(self, name: str) -> Adapter:
        """Return an adapter; EngineRefused, in SGLang's words, if it is not loaded."""
        adapter = self._adapters.get(name)
        if adapter is None:
            missing = f"Got LoRA adapter that has never been loaded: {name}"
            raise EngineRefused(f"{missing}. All loaded adapters: {sorted(self._adapters)}.")
        return adapter

    def put(self, adapter: Adapter) -> None:
        """Add an adapter; EngineRefused if its name is in use."""
        if adapter.name in self._adapters:
            raise EngineRefused(f"LoRA adapter {adapter.name} is loaded already; unload it first")
        self._adapters[adapter.name] = adapter

    def forget(self, name: str) -> None:
        """Remove an adapter; its requests keep it. EngineRefused if it is not loaded."""
        del self._adapters[self.find(name).name]

    def folders(self) -> dict[str, str]:
        """Return the folders of loaded adapters by name."""
        return {name: adapter.folder for name, adapter in self._adapters.items()}


@dataclass(frozen=True, slots=True)
class Rows:
    """Requests that attend together, padded to the longest.

    The step's tokens of these rows are `start:stop` of N. If nothing needs padding, `pad_BT` and
    `unpad_n` are None and no copy is made.
    """

    start: int
    stop: int
    slots_BS: Tensor
    """Memory slot of each position of each row's context; int64."""
    mask_BTS: Tensor
    """0 where token t may attend to position s, else -inf; in the model's dtype."""
    pad_BT: Tensor | None
    """Index into start:stop of each padded token; int64, padding points at 0."""
    unpad_n: Tensor | None
    """Index into B * T of each token of start:stop; int64."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer's weights; projections that share an input are fused."""

    attention_norm_W: Tensor
    qkv_weight: Tensor
    """((H + 2K) * D, W); rows of q and k interleaved for complex rotation."""
    qkv_bias: Tensor | None
    head_norm: Tensor | None
    """Qwen3's q and k norms as (H + K, D)."""
    output_weight: Tensor
    output_bias: Tensor | None
    mlp_norm_W: Tensor
    gate_up_weight: Tensor
    """(2F, W)."""
    gate_up_bias: Tensor | None
    down_weight: Tensor
    down_bias: Tensor | None


class Model:
    """One policy version's weights and their forward pass."""

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        architecture: Architecture | None = None,
        weights: dict[str, Tensor] | None = None,
    ) -> None:
        """Load the model in `folder`; ModelError if it is not a supported one.

        With an `architecture`, config.json is not read, so a weight update needs only safetensors,
        as with SGLang. With `weights`, of `dtype`, no file is read and the folder is only a name.
        """
        self.architecture = arch = architecture or read_architecture(folder)
        self.dtype = dtype
        weights = read_weights(folder, dtype) if weights is None else weights
        try:
            self._embed_VW = weights["model.embed_tokens.weight"]
            self._norm_W = weights["model.norm.weight"]
            # Hugging Face ties by config, and omits lm_head from the file.
            self._head_VW = self._embed_VW if arch.ties_embeddings else weights["lm_head.weight"]
            self._layers = [build_layer(arch, weights, i) for i in range(arch.num_layers)]
        except (KeyError, RuntimeError) as error:
            raise ModelError(f"{folder}: its weights do not fit its config.json: {error}") from None
        self._check_shapes(folder)
        self._rotation = rotation_table(arch)

    def _check_shapes(self, folder: Path) -> None:
        arch = self.architecture
        width, heads = arch.width, arch.num_heads * arch.head_dim
        expected = {"embed_tokens": (self._embed_VW, (arch.vocab_size, width))}
        expected["lm_head"] = (self._head_VW, (arch.vocab_size, width))
        for index, layer in enumerate(self._layers):
            rows = heads + 2 * arch.num_kv_heads * arch.head_dim
            expected[f"layer {index}'s q, k and v"] = (layer.qkv_weight, (rows, width))
            expected[f"layer {index}'s o_proj"] = (layer.output_weight, (width, heads))
        for name, (tensor, shape) in expected.items():
            if tensor.shape != shape:
                raise ModelError(
                    f"{folder}: {name} of shape {tuple(tensor.shape)} does not fit the model's "
                    f"architecture, which has {shape}"
                )

    def drop_weights(self) -> None:
        """Free the weights; only the architecture remains usable."""
        empty = torch.empty(0, dtype=self.dtype)
        self._embed_VW = self._norm_W = self._head_VW = self._rotation = empty
        self._layers = []

    def projections(self, index: int) -> dict[str, Tensor]:
        """Return the weights of layer `index` that adapters may add to."""
        layer = self._layers[index]
        return {
            "qkv": layer.qkv_weight,
            "output": layer.output_weight,
            "gate_up": layer.gate_up_weight,
            "down": layer.down_weight,
        }

    def hidden(
        self,
        tokens_N: Tensor,
        positions_N: Tensor,
        slots_N: Tensor,
        kv: Tensor,
        rows: Sequence[Rows],
        adapters: Sequence[AppliedAdapter] = (),
    ) -> Tensor:
        """Return final normed hidden states (N, W); write keys and values of the tokens to `kv`.

        `kv` is (layers, P, 2, K, D); `slots_N` are the slots of the tokens.
        """
        eps = self.architecture.norm_eps
        width = (self.architecture.width,)
        rotation_N1D = self._rotation.index_select(0, positions_N).unsqueeze(1)
        hidden_NW = functional.embedding(tokens_N, self._embed_VW)
        for index, (layer, kv_layer) in enumerate(zip(self._layers, kv, strict=True)):
            own = [(adapter.layers[index], places_n) for adapter, places_n in adapters]
            normed_NW = functional.rms_norm(hidden_NW, width, layer.attention_norm_W, eps)
            qkv = project(
                normed_NW, layer.qkv_weight, layer.qkv_bias, [(a.qkv, at) for a, at in own]
            )
            attended = self._attend(layer, qkv, rotation_N1D, slots_N, kv_layer, rows)
            hidden_NW = hidden_NW + project(
                attended, layer.output_weight, layer.output_bias, [(a.output, at) for a, at in own]
            )
            normed_NW = functional.rms_norm(hidden_NW, width, layer.mlp_norm_W, eps)
            gate_NF, up_NF = project(
                normed_NW,
                layer.gate_up_weight,
                layer.gate_up_bias,
                [(a.gate_up, at) for a, at in own],
            ).chunk(2, dim=-1)
            mixed_NF = functional.silu(gate_NF) * up_NF
            hidden_NW = hidden_NW + project(
                mixed_NF, layer.down_weight, layer.down_bias, [(a.down, at) for a, at in own]
            )
        return functional.rms_norm(hidden_NW, width, self._norm_W, eps)

    def logits(self, hidden_NW: Tensor) -> Tensor:
        """Return float32 logits (N, V)."""
        return functional.linear(hidden_NW, self._head_VW).float()

    def _attend(
        self,
        layer: Layer,
        qkv: Tensor,
        rotation_N1D: Tensor,
        slots_N: Tensor,
        kv_layer: Tensor,
        rows: Sequence[Rows],
    ) -> Tensor:
        """Return the attention output (N, H * D) of one layer."""
        arch = self.architecture
        num_heads, num_kv = arch.num_heads, arch.num_kv_heads
        qkv = qkv.view(-1, num_heads + 2 * num_kv, arch.head_dim)
        qk = qkv[:, : num_heads + num_kv]
        if layer.head_norm is not None:
            qk = functional.rms_norm(qk, (arch.head_dim,), None, arch.norm_eps) * layer.head_norm
        qk = rotate(qk, rotation_N1D).to(self.dtype)
        key_value = torch.stack((qk[:, num_heads:], qkv[:, num_heads + num_kv :]), dim=1)
        kv_layer.index_copy_(0, slots_N, key_value)
        queries = qk[:, :num_heads]
        outputs = [attend_rows(queries[r.start : r.stop], kv_layer, r) for r in rows]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def attend_rows(queries_nHD: Tensor, kv_layer: Tensor, rows: Rows) -> Tensor:
    """Return the attention of one group of rows over their contexts: (n, H * D).

    The G query heads that share a key-value head are placed beside the tokens, so that grouped
    queries need no copies of keys.
    """
    num_kv, head_dim = kv_layer.shape[-2:]
    num_rows, context = rows.slots_BS.shape
    group = queries_nHD.shape[1] // num_kv
    gathered = kv_layer.index_select(0, rows.slots_BS.view(-1))
    gathered = gathered.view(num_rows, context, 2, num_kv, head_dim)
    keys, values = gathered.permute(2, 0, 3, 1, 4).unbind(0)
    if rows.pad_BT is not None:
        queries_nHD = queries_nHD.index_select(0, rows.pad_BT.view(-1))
    queries = queries_nHD.reshape(num_rows, -1, num_kv, group, head_dim).transpose(1, 2)
    queries = queries.reshape(num_rows, num_kv, -1, head_dim)
    mask = rows.mask_BTS.unsqueeze(1)
    if mask.shape[2] > 1:
        mask = mask.repeat_interleave(group, dim=2)
    mixed = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
    mixed = mixed.view(num_rows, num_kv, -1, group, head_dim).transpose(1, 2)
    mixed = mixed.reshape(-1, num_kv * group * head_dim)
    return mixed if rows.unpad_n is None else mixed.index_select(0, rows.unpad_n)


def rotate(heads: Tensor, rotation_N1D: Tensor) -> Tensor:
    """Apply the rotary embedding as one complex product over pairs of interleaved dimensions."""
    planes = torch.view_as_complex(heads.float().reshape(*heads.shape[:-1], -1, 2))
    return torch.view_as_real(planes * rotation_N1D).flatten(-2)


def rotation_table(arch: Architecture) -> Tensor:
    """Return exp(i * position * frequency): complex64 of shape (max_context, D / 2)."""
    positions = torch.arange(arch.max_context, dtype=torch.float32)
    angles = torch.outer(positions, rotary_frequencies(arch.rope, arch.head_dim))
    return torch.complex(angles.cos(), angles.sin())


def build_layer(arch: Architecture, weights: dict[str, Tensor], index: int) -> Layer:
    """Fuse layer `index` from Hugging Face's tensors; KeyError if one is missing."""
    layer = f"model.layers.{index}."
    attention, mlp = layer + "self_attn.", layer + "mlp."

    def fused(prefix: str, kind: str, names: Sequence[str]) -> Tensor | None:
        """Stack the named projections; None for a bias that the model lacks."""
        if kind == "bias" and f"{prefix}{names[0]}.bias" not in weights:
            return None
        parts = [weights[f"{prefix}{name}.{kind}"] for name in names]
        parts = [
            interleave(part, arch.head_dim) if name in ("q_proj", "k_proj") else part
            for name, part in zip(names, parts, strict=True)
        ]
        return torch.cat(parts).contiguous()

    head_norm = None
    if arch.family == "qwen3":
        q_norm = interleave(weights[attention + "q_norm.weight"], arch.head_dim)
        k_norm = interleave(weights[attention + "k_norm.weight"], arch.head_dim)
        head_norm = torch.cat(
            (q_norm.expand(arch.num_heads, -1), k_norm.expand(arch.num_kv_heads, -1))
        )
    return Layer(
        attention_norm_W=weights[layer + "input_layernorm.weight"],
        qkv_weight=require(fused(attention, "weight", ("q_proj", "k_proj", "v_proj"))),
        qkv_bias=fused(attention, "bias", ("q_proj", "k_proj", "v_proj")),
        head_norm=head_norm,
        output_weight=weights[attention + "o_proj.weight"],
        output_bias=weights.get(attention + "o_proj.bias"),
        mlp_norm_W=weights[layer + "post_attention_layernorm.weight"],
        gate_up_weight=require(fused(mlp, "weight", ("gate_proj", "up_proj"))),
        gate_up_bias=fused(mlp, "bias", ("gate_proj", "up_proj")),
        down_weight=weights[mlp + "down_proj.weight"],
        down_bias=weights.get(mlp + "down_proj.bias"),
    )


def require(tensor: Tensor | None) -> Tensor:
    """Narrow the type: a weight, unlike a bias, always exists."""
    assert tensor is not None
    return tensor


def interleave(tensor: Tensor, head_dim: int) -> Tensor:
    """Reorder each head's rows from (first halves, second halves) to pairs.

    Hugging Face rotates dimension i with i + D/2; adjacent pairs are complex numbers. Scores do not
    change, since queries and keys are reordered alike.
    """
    heads = tensor.view(-1, 2, head_dim // 2, *tensor.shape[1:])
    return heads.transpose(1, 2).reshape(tensor.shape)
