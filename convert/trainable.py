"""A model that can be trained: the decoder of running on parameters, all of them or LoRA beside frozen ones.

There is no second forward: blocks are built by the loader that runs bundles. Knows no data and no optimiser.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..quant.linear import DenseLinear, Linear
from ..runtime.architecture import Architecture
from ..runtime.block import Block
from ..runtime.decoder import Decoder, load_block, load_frame
from ..runtime.pass_store import OneLayer, PassStore
from ..runtime.safetensors_file import TensorInfo
from ..runtime.step import Step
from ..runtime.store import HEAD, TensorStore, is_tied
from . import lora
from .cross_entropy import cross_entropy
from .lora import LoraLinear, LoraSettings
from .stream import Entry, lazy

IGNORED = -100
"""A target that counts nothing, as everywhere in torch."""


class MemoryStore:
    """Tensors by name that are in memory already. A `TensorStore`; the tensors themselves are given back."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def names(self) -> Collection[str]:
        """See `TensorStore.names`."""
        return self._tensors.keys()

    def info(self, name: str) -> TensorInfo:
        """See `TensorStore.info`."""
        tensor = self._tensors[name]
        return TensorInfo(tuple(tensor.shape), tensor.dtype)

    def read(self, name: str) -> Tensor:
        """See `TensorStore.read`."""
        return self._tensors[name]

    def release(self, name: str) -> None:
        """See `TensorStore.release`."""


class Trainable(nn.Module):
    """A decoder whose weights are parameters.

    Without `lora` every weight is trained, in float32; with it the weights are frozen, in `frozen_dtype`, and only the
    low-rank matrices are trained, in float32. A tied head is the embedding: one parameter, counted once.

    With `checkpointing` a block's activations are computed again in the backward pass instead of being kept.
    """

    def __init__(
        self,
        arch: Architecture,
        store: TensorStore,
        *,
        device: torch.device | str = "cpu",
        lora_settings: LoraSettings | None = None,
        frozen_dtype: torch.dtype = torch.float32,
        checkpointing: bool = False,
    ) -> None:
        super().__init__()
        self.arch = arch
        self.checkpointing = checkpointing
        self.lora = lora_settings
        self._tied = is_tied(store, tied=arch.tied)
        full = lora_settings is None
        dtype = torch.float32 if full else frozen_dtype
        self._weights = {name: self._take(store, name, device, dtype, trained=full) for name in self._stored()}
        self._pairs: dict[str, nn.Parameter] = {}
        if lora_settings is not None:
            started = lora.start(arch, lora_settings, device=device)
            self._pairs = {name: nn.Parameter(tensor) for name, tensor in started.items()}
        for name, parameter in (self._weights | self._pairs).items():
            self.register_parameter(name.replace(".", "/"), parameter)  # torch allows no dots
        self.decoder = self._build(device, dtype)

    def forward(
        self, ids: Tensor, targets: Tensor, counts: Sequence[int] | None = None, sources: Sequence[int] | None = None
    ) -> Tensor:
        """Sum of the cross-entropy in nats over the tokens of `targets` [B, S] that are not -100; a float32 scalar.

        `targets[b, s]` is what comes after `ids[b, s]`. See `hidden` for the others.
        """
        return self.loss(self.hidden(ids, counts, sources), targets)

    def hidden(self, ids: Tensor, counts: Sequence[int] | None = None, sources: Sequence[int] | None = None) -> Tensor:
        """Ids [B, S] -> the residual stream after the last block [B, S, hidden].

        `sources[l]` is the layer whose keys and values layer l reads (R-CLA draws it anew for every pass); by default
        the architecture's own map. Columns beyond `counts[b]` are padding: what they hold does not matter to the
        others.
        """
        *_, last = self.states(ids, counts, sources, after=[self.arch.num_layers - 1])
        return last

    def states(
        self,
        ids: Tensor,
        counts: Sequence[int] | None = None,
        sources: Sequence[int] | None = None,
        *,
        after: Iterable[int],
    ) -> list[Tensor]:
        """The residual stream [B, S, hidden] after each of these blocks (from 0, rising); blocks above do not run."""
        wanted = set(after)
        decoder = self.decoder
        step = decoder.step(None, ids, self._needed(counts))
        kv = PassStore(self.arch, sources)
        h = decoder.embed(ids)
        found: list[Tensor] = []
        for block in decoder.blocks[: max(wanted) + 1]:
            h = self._through(block, h, step, kv, sources)
            if block.index in wanted:
                found.append(h)
        return found

    def loss(self, h: Tensor, targets: Tensor) -> Tensor:
        """Sum of the cross-entropy of h [B, S, hidden] at `targets` [B, S]; -100 counts nothing, and costs nothing."""
        counted = targets != IGNORED
        rows = h.flatten(0, -2) if bool(counted.all()) else h[counted]
        head = self.decoder.head
        if not isinstance(head, DenseLinear):
            raise TypeError("the head of a model in training is dense")
        return cross_entropy(
            self.decoder.final_norm(rows), head.weight, targets[counted], softcap=self.arch.logit_softcap
        )

    def trained(self) -> dict[str, nn.Parameter]:
        """Parameters that are trained, by their Hugging Face name; LoRA's by its matrix and `lora_down`, `lora_up`."""
        return dict(self._pairs or self._weights)

    @torch.no_grad()
    def weight(self, name: str, source: TensorStore) -> Tensor:
        """One weight as it is saved: what was trained, or that of `source`, in its dtype, with LoRA merged onto it.

        Onto the source's: what is frozen here may have been rounded.
        """
        if self.lora is None:
            return self._weights[name].detach()
        weight, pair = source.read(name), lora.parameter_names(name.removesuffix(".weight"))
        if pair[0] not in self._pairs:
            return weight
        down, up = (self._pairs[each] for each in pair)
        return lora.merge(weight.to(down.device), down, up, self.lora.scale)

    def state(self) -> dict[str, Tensor]:
        """All weights by their Hugging Face names, LoRA merged. Not copies, where nothing is merged."""
        own = MemoryStore(self._weights)
        return {name: self.weight(name, own).detach() for name in self._weights}

    @property
    def weight_names(self) -> list[str]:
        """Names of all weights; without the head where it is the embedding."""
        return list(self._weights)

    def _stored(self) -> list[str]:
        names = set(self.arch.tensors()) - {HEAD}
        return sorted(names if self._tied else names | {HEAD})

    @staticmethod
    def _take(
        store: TensorStore, name: str, device: torch.device | str, dtype: torch.dtype, *, trained: bool
    ) -> nn.Parameter:
        tensor = store.read(name).to(device, dtype)
        # What is trained is written to, and what a store gives may be the file itself.
        return nn.Parameter(tensor.clone() if trained else tensor, requires_grad=trained)

    def _build(self, device: torch.device | str, dtype: torch.dtype) -> Decoder:
        store = MemoryStore(self._weights)
        indices = range(self.arch.num_layers)
        blocks = [
            load_block(self.arch, store, index, device=device, dtype=dtype, make=self._linear) for index in indices
        ]
        return load_frame(self.arch, store, blocks, device=device, dtype=dtype)

    def _linear(self, name: str, weight: Tensor, bias: Tensor | None) -> Linear:
        dense = DenseLinear(weight, bias)
        down, up = (self._pairs.get(part) for part in lora.parameter_names(name))
        if self.lora is None or down is None or up is None:
            return dense
        return LoraLinear(dense, down, up, self.lora.scale)

    def _needed(self, counts: Sequence[int] | None) -> Sequence[int] | None:
        """Right padding is invisible under a causal mask; only rotations that depend on a row's length ask for it."""
        if counts is None:
            return None
        regimes = {tuple(spec.regime(count) for spec in self.arch.ropes) for count in counts}
        return counts if len(regimes) > 1 else None

    def _through(self, block: Block, h: Tensor, step: Step, kv: PassStore, sources: Sequence[int] | None) -> Tensor:
        if not (self.checkpointing and torch.is_grad_enabled()):
            return block(h, step, kv)
        source = (self.arch.kv_sources if sources is None else sources)[block.index]
        given = () if source == block.index else kv.fetch(step, block.index)
        run = _pure(block, step)
        h, *own = checkpoint(run, h, *given, use_reentrant=False, preserve_rng_state=False)
        if own:
            kv.store(step, block.index, *own)
        return h


def trained_entries(model: Trainable, source: TensorStore) -> list[Entry]:
    """Every weight of a trained model, to be written in the dtype that it has in `source`, where it came from."""
    return [
        lazy(name, source.info(name).dtype, source.info(name).shape, partial(model.weight, name, source))
        for name in model.weight_names
    ]


def _pure(block: Block, step: Step) -> Callable[..., tuple[Tensor, ...]]:
    """The block as a function of tensors alone, since what is computed again must not write to the pass's store."""

    def run(h: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        kv = OneLayer((given[0], given[1]) if given else None)
        return block(h, step, kv), *(kv.own or ())

    return run
