"""The decoder: embedding, blocks, final norm and head, and the loop between them.

Computes only. Which blocks run is the caller's choice (`layers=`, or a loop of its own over `Decoder.blocks`), what is
remembered belongs to the KV store. Dense generation, exits and training all run this forward.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import embedding as look_up

from ..quant.linear import DenseLinear, Linear
from .architecture import Architecture, block_prefix
from .attention import HeadNorm, RMSNorm
from .block import Block, Fused, Norms, Projection, Separate, SeparateHeads
from .cache import KVCache, KVStore
from .config_types import check_known
from .rope import Rotary
from .stack import Stack, run_layers
from .step import Pass, Step, chunk_counts
from .store import EMBEDDING, HEAD, TensorStore, is_tied

FINAL_NORM = "model.norm.weight"


class Decoder:
    """A model on plain tensors. The residual stream has the dtype of the weights, logits are float32."""

    def __init__(
        self, arch: Architecture, *, embedding: Tensor, blocks: Sequence[Block], final_norm: RMSNorm, head: Linear
    ) -> None:
        self.arch = arch
        self.embedding = embedding
        self.blocks = blocks
        self.final_norm = final_norm
        self.head = head
        self._rotaries = [Rotary(spec, device=self.device, dtype=self.dtype) for spec in arch.ropes]
        # Rounded to the weights' dtype before the product, as Gemma was trained.
        scale = arch.embedding_scale
        self._scale = None if scale is None else torch.tensor(scale, dtype=self.dtype, device=self.device)

    @property
    def dtype(self) -> torch.dtype:
        """Of the residual stream."""
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        """Where passes run."""
        return self.embedding.device

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """An empty cache of this model's shape, dtype and device."""
        return KVCache(self.arch, batch=batch, capacity=capacity, dtype=self.dtype, device=self.device)

    def step(
        self,
        cache: KVCache | None,
        ids: Tensor,
        counts: Sequence[int] | None = None,
        *,
        layers: range | None = None,
    ) -> Step:
        """Prepare a pass of ids [B, S] behind what `cache` holds; without a cache, from position 0.

        `counts` gives the valid tokens of each row where rows are padded on the right. `layers` are the blocks that
        will run when those lag behind others. Raises UsageError when the cache is too small, RotationChangedError
        when longrope's frequencies change at this length: cut the cache to 0 and run the whole sequence again.
        """
        rows = chunk_counts(ids, counts)
        if cache is None:
            starts = (0,) * len(rows)
        else:
            starts = cache.starts(range(self.arch.num_layers) if layers is None else layers)
            cache.check_room(starts, rows)
        step = Step(self.arch, self._rotaries, starts=starts, counts=rows, dtype=self.dtype, device=self.device)
        if cache is not None:
            cache.begin(step)
        return step

    def segment(self, start: int, count: int, length: int) -> Step:
        """Prepare a pass of tokens `start` .. `start + count` of one sequence that will have `length` tokens in all."""
        return Step(
            self.arch,
            self._rotaries,
            starts=(start,),
            counts=(count,),
            dtype=self.dtype,
            device=self.device,
            length=length,
        )

    def embed(self, ids: Tensor) -> Tensor:
        """Ids [B, S] -> [B, S, hidden]. Raises FormatError for an id beyond the vocabulary, on a CPU."""
        try:
            h = look_up(ids, self.embedding)
        except IndexError:  # who encodes looks first (Tokenizer.check_known), where the config tells the size
            check_known(int(ids.max()), len(self.embedding))
            raise
        return h if self._scale is None else h * self._scale

    def run(self, h: Tensor, step: Pass, kv: KVStore, layers: range | None = None) -> Tensor:
        """[B, S, hidden] through `layers` (all by default) -> [B, S, hidden]."""
        return run_layers(self.blocks, h, step, kv, range(len(self.blocks)) if layers is None else layers)

    def logits(self, h: Tensor) -> Tensor:
        """[..., hidden] -> [..., vocab] float32, soft-capped where the family does so."""
        return self.scores(self.final_norm(h))

    def scores(self, x: Tensor) -> Tensor:
        """`logits` of x that is normalised already, by the final norm or an exit's own."""
        scores = self.head(x).float()
        cap = self.arch.logit_softcap
        return scores if cap is None else cap * torch.tanh(scores / cap)


MakeLinear = Callable[[str, Tensor, Tensor | None], Linear]
"""From the full name of a matrix ("model.layers.0.mlp.up_proj"), its weight and bias to the product."""


def _dense(_name: str, weight: Tensor, bias: Tensor | None) -> Linear:
    return DenseLinear(weight, bias)


def load_block(
    arch: Architecture,
    store: TensorStore,
    index: int,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    make: MakeLinear = _dense,
) -> Block:
    """Block `index` with dense weights. Nothing is copied when the store's tensors already fit device and dtype.

    `make` may put something around the dense product, as training with LoRA does.
    """
    tensors = read_block(arch, store, index, device=device, dtype=dtype)

    def linear(name: str) -> Linear:
        return make(block_prefix(index) + name, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))

    return Block(
        arch,
        index,
        make_norms(arch, tensors),
        qkv=_qkv(arch, index, linear),
        output=linear("self_attn.o_proj"),
        gate_up=_gate_up(arch, linear),
        down=linear("mlp.down_proj"),
    )


def read_block(
    arch: Architecture, store: TensorStore, index: int, *, device: torch.device | str, dtype: torch.dtype
) -> dict[str, Tensor]:
    """The tensors of block `index` by their names inside the block ("self_attn.q_proj.weight")."""
    prefix = block_prefix(index)
    return {name.removeprefix(prefix): store.read(name).to(device, dtype) for name in arch.block_tensors(index)}


def make_norms(arch: Architecture, tensors: Mapping[str, Tensor]) -> Norms:
    """The norms of a block from its tensors (names inside the block)."""

    def norm(name: str) -> RMSNorm | None:
        weight = tensors.get(f"{name}.weight")
        return None if weight is None else RMSNorm(weight, arch.norm_eps, offset=arch.norm_offset)

    first = RMSNorm(tensors["input_layernorm.weight"], arch.norm_eps, offset=arch.norm_offset)
    after_attention = "post_attention_layernorm"
    if arch.sandwich_norms:  # what other families call post-attention is Gemma's pre-feedforward
        before_mlp, after = "pre_feedforward_layernorm", (norm(after_attention), norm("post_feedforward_layernorm"))
    else:
        before_mlp, after = after_attention, (None, None)
    second = RMSNorm(tensors[f"{before_mlp}.weight"], arch.norm_eps, offset=arch.norm_offset)
    return Norms(first, second, *after, _head_norm(arch, tensors))


def _head_norm(arch: Architecture, tensors: Mapping[str, Tensor]) -> HeadNorm | None:
    """Qwen 3, Gemma 3: a norm over each head of query and key; a follower (R-CLA) has no keys."""
    if not arch.qk_norm:
        return None
    weights = [(tensors["self_attn.q_norm.weight"], arch.num_heads)]
    if "self_attn.k_norm.weight" in tensors:
        weights.append((tensors["self_attn.k_norm.weight"], arch.num_kv_heads))
    return HeadNorm(weights, arch.norm_eps, offset=arch.norm_offset)


def _qkv(arch: Architecture, index: int, linear: Callable[[str], Linear]) -> Projection:
    if arch.fused_qkv:
        return Fused(linear("self_attn.qkv_proj"), arch.qkv_sizes(index))
    names = "qkv" if arch.has_kv(index) else "q"
    return SeparateHeads([linear(f"self_attn.{name}_proj") for name in names])


def _gate_up(arch: Architecture, linear: Callable[[str], Linear]) -> Projection:
    if arch.fused_gate_up:
        return Fused(linear("mlp.gate_up_proj"), (arch.intermediate_size,) * 2)
    return Separate([linear("mlp.gate_proj"), linear("mlp.up_proj")])


def load_decoder(arch: Architecture, store: TensorStore, *, device: torch.device | str, dtype: torch.dtype) -> Decoder:
    """The whole dense model. Nothing is copied when the store's tensors already fit device and dtype."""
    blocks = [load_block(arch, store, index, device=device, dtype=dtype) for index in range(arch.num_layers)]
    return load_frame(arch, store, Stack(arch, blocks), device=device, dtype=dtype)


def load_frame(
    arch: Architecture,
    store: TensorStore,
    blocks: Sequence[Block],
    *,
    device: torch.device | str,
    dtype: torch.dtype,
) -> Decoder:
    """A decoder of these blocks with the store's embedding, final norm and head."""
    embedding = store.read(EMBEDDING).to(device, dtype)
    head = embedding if is_tied(store, tied=arch.tied) else store.read(HEAD).to(device, dtype)
    norm = RMSNorm(store.read(FINAL_NORM).to(device, dtype), arch.norm_eps, offset=arch.norm_offset)
    return Decoder(arch, embedding=embedding, blocks=blocks, final_norm=norm, head=DenseLinear(head))
