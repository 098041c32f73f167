"""The geometry of a decoder as data, read from config.json.

One block serves every family: what differs is here. Unknown families and fields that would change the maths are
refused by name. Knows no weights but which tensors there are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ..errors import UsageError
from .families import read_config
from .rope import RopeSpec
from .store import TensorStore, is_tied


@dataclass(frozen=True)
class LayerSpec:
    """What sets one layer's attention apart: `window` tokens seen (None = all), `rope` index (None = no rotation)."""

    window: int | None
    rope: int | None


@dataclass(frozen=True)
class Architecture:
    """A decoder-only transformer: sizes, switches, and one LayerSpec per block.

    `kv_sources[l]` is the layer whose keys and values layer l reads: itself, or an earlier keeper (R-CLA). A layer that
    reads another's has no K and V projections.
    """

    family: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    activation: str
    norm_offset: bool  # Gemma: the norm multiplies by 1 + weight, in float32
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sandwich_norms: bool  # Gemma: norms after attention and MLP as well as before
    embedding_scale: float | None
    attention_scale: float
    attention_softcap: float | None
    logit_softcap: float | None
    query_scaling: tuple[float, int] | None  # Ministral 3: (beta, original length) of the position-dependent scale
    tied: bool
    fused_qkv: bool
    fused_gate_up: bool
    layers: tuple[LayerSpec, ...]
    ropes: tuple[RopeSpec, ...]
    kv_sources: tuple[int, ...]

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Architecture":
        """Read a config.json (transformers 4 or 5). Raises UnsupportedError or FormatError naming the field."""
        fields = read_config(config)
        layers = tuple(LayerSpec(window, rope) for window, rope in fields.pop("layers"))
        return cls(layers=layers, kv_sources=tuple(range(len(layers))), num_layers=len(layers), **fields)

    @cached_property
    def kinds(self) -> tuple[LayerSpec, ...]:
        """The distinct LayerSpecs: what a pass prepares once for all layers of a kind."""
        return tuple(dict.fromkeys(self.layers))

    @cached_property
    def kind_of(self) -> tuple[int, ...]:
        """Layer -> index into `kinds`."""
        return tuple(self.kinds.index(layer) for layer in self.layers)

    @cached_property
    def slots(self) -> tuple[int, ...]:
        """Layer -> cache slot; only keepers have a slot of their own."""
        keepers = sorted(set(self.kv_sources))
        return tuple(keepers.index(source) for source in self.kv_sources)

    def has_kv(self, index: int) -> bool:
        """Whether layer `index` projects keys and values of its own."""
        return self.kv_sources[index] == index

    def qkv_sizes(self, index: int) -> tuple[int, ...]:
        """Widths of query with key, and of value, in layer `index`; the query's alone where it has no others."""
        narrow = self.num_kv_heads * self.head_dim
        query = self.num_heads * self.head_dim
        return (query + narrow, narrow) if self.has_kv(index) else (query,)

    def kv_bytes(self, itemsize: int = 2) -> int:
        """Bytes of keys and values that a token takes in a cache of `slots`, `itemsize` for each number (16 bits)."""
        return len(set(self.kv_sources)) * 2 * self.num_kv_heads * self.head_dim * itemsize

    def share(self, sources: Sequence[int]) -> "Architecture":
        """The same model with layer l reading the keys and values of `sources[l]` (R-CLA's map, counted from 0)."""
        if len(sources) != self.num_layers:
            raise UsageError(f"The sharing map has {len(sources)} layers, the model {self.num_layers}")
        for layer, source in enumerate(sources):
            if not 0 <= source <= layer or sources[source] != source:
                what = f"Layer {layer + 1} cannot read the cache of layer {source + 1}"
                raise UsageError(what, "Name an earlier layer that keeps one.")
            if self.layers[layer] != self.layers[source]:
                raise UsageError(
                    f"Layers {source + 1} and {layer + 1} attend differently and cannot share a cache",
                    "Group layers of one window and one rotation.",
                )
        return replace(self, kv_sources=tuple(sources))

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Every backbone tensor by its Hugging Face name, with its shape; without lm_head where it is tied."""
        size = (self.vocab_size, self.hidden_size)
        named: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": size}
        for index in range(self.num_layers):
            named |= self.block_tensors(index)
        named["model.norm.weight"] = (self.hidden_size,)
        if not self.tied:
            named["lm_head.weight"] = size
        return named

    def block_tensors(self, index: int) -> dict[str, tuple[int, ...]]:
        """Every tensor of block `index`: matrices, biases, norms."""
        prefix = block_prefix(index)
        named: dict[str, tuple[int, ...]] = {f"{prefix}{name}.weight": (self.hidden_size,) for name in self._norms()}
        if self.qk_norm:
            named[f"{prefix}self_attn.q_norm.weight"] = (self.head_dim,)
            if self.has_kv(index):
                named[f"{prefix}self_attn.k_norm.weight"] = (self.head_dim,)
        for name, shape in self.block_matrices(index).items():
            named[name] = shape
            if self._has_bias(name):
                named[name.removesuffix("weight") + "bias"] = shape[:1]
        return named

    def block_matrices(self, index: int) -> dict[str, tuple[int, int]]:
        """The weights of block `index` that a quantiser replaces: name -> (N, K), in the order q k v o gate up down."""
        prefix = block_prefix(index)
        hidden, wide, inner = self.hidden_size, self.num_heads * self.head_dim, self.intermediate_size
        narrow = self.num_kv_heads * self.head_dim
        # Where Q, K and V are one matrix, that of a layer without keys has the query's rows alone.
        attention: dict[str, tuple[int, int]] = {"qkv_proj": (sum(self.qkv_sizes(index)), hidden)}
        if not self.fused_qkv:
            attention = {"q_proj": (wide, hidden)}
            if self.has_kv(index):
                attention |= {"k_proj": (narrow, hidden), "v_proj": (narrow, hidden)}
        mlp = (
            {"gate_up_proj": (2 * inner, hidden)}
            if self.fused_gate_up
            else dict.fromkeys(("gate_proj", "up_proj"), (inner, hidden))
        )
        shapes = {f"self_attn.{name}": shape for name, shape in (attention | {"o_proj": (hidden, wide)}).items()}
        shapes |= {f"mlp.{name}": shape for name, shape in (mlp | {"down_proj": (hidden, inner)}).items()}
        return {f"{prefix}{name}.weight": shape for name, shape in shapes.items()}

    def _norms(self) -> tuple[str, ...]:
        plain = ("input_layernorm", "post_attention_layernorm")
        return (*plain, "pre_feedforward_layernorm", "post_feedforward_layernorm") if self.sandwich_norms else plain

    def _has_bias(self, name: str) -> bool:
        if ".mlp." in name:
            return self.mlp_bias
        return self.o_bias if ".o_proj." in name else self.qkv_bias


def architecture_of(config: Mapping[str, Any], store: TensorStore) -> Architecture:
    """Return the geometry of a model; the tensors, not the config, decide whether the head is the embedding."""
    arch = Architecture.from_config(config)
    return replace(arch, tied=is_tied(store, tied=arch.tied))


def block_prefix(index: int) -> str:
    """What the names of block `index` begin with in a Hugging Face checkpoint."""
    return f"model.layers.{index}."
