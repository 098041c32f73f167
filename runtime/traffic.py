"""How many bytes of weights, keys and values one decode pass must read from memory.

Arithmetic on a loaded model; runs nothing. With the bandwidth of the machine it gives the least time of a token.
"""

from collections.abc import Iterator, Sequence
from typing import cast

from torch import Tensor

from ..quant.linear import Linear
from .architecture import Architecture
from .block import Block
from .decoder import Decoder
from .dense import Dense
from .generate import Model
from .junctions import Junctions
from .nvium import Nvium
from .offload import StreamedBlocks
from .river import River


class Traffic:
    """What passes of a decoder read. `exits[l]` stands in for block l (from 0) of rows that have left below it.

    Ask after the model has run: 4-bit matrices are packed at their first product, and sizes are those in memory.
    """

    def __init__(self, decoder: Decoder, exits: Sequence[Block] = ()) -> None:
        self._decoder, self._exits = decoder, exits
        self.layers = decoder.arch.num_layers
        self._sizes: dict[int, int] = {}
        self._keys = tuple(_keys(decoder.arch, decoder.dtype.itemsize))

    def weights(self, depths: Sequence[int]) -> int:
        """Bytes of weights in one pass whose rows leave the backbone at `depths`; each weight is read once for all."""
        dense = [self._decoder.blocks[index] for index in range(max(depths))]
        exits = [self._exits[index] for index in range(min(depths), self.layers)]
        blocks = {id(block): block for block in (*dense, *exits)}  # a block may stand in both places
        return sum(map(self._size, blocks.values())) + self._decoder.head.nbytes

    def keys_values(self, length: int, depth: int | None = None) -> int:
        """Bytes of keys and values of one row that attends to `length` tokens, in the first `depth` layers or in all.

        Layers that read another's (R-CLA) are not counted again: this is the least that any pass must read.
        """
        layers = self.layers if depth is None else depth
        return sum(size * min(length, window or length) for layer, size, window in self._keys if layer < layers)

    def of_pass(self, depths: Sequence[int], length: int) -> int:
        """All bytes of one pass, whose rows attend to `length` tokens each."""
        return self.weights(depths) + len(depths) * self.keys_values(length)

    def _size(self, block: Block) -> int:
        if id(block) not in self._sizes:
            self._sizes[id(block)] = block_bytes(block)
        return self._sizes[id(block)]


class MixtureTraffic(Traffic):
    """What passes of N-vium read at least: blocks up to where each row left, routers on the way, one exit's adapter.

    What rows left out runs in later passes over the same weights; only a pass that was forced adds to it.
    """

    def __init__(self, decoder: Decoder, junctions: Junctions) -> None:
        super().__init__(decoder)
        self._junctions = junctions

    def weights(self, depths: Sequence[int]) -> int:
        """See `Traffic.weights`."""
        deepest = max(depths)
        blocks = sum(self._size(self._decoder.blocks[index]) for index in range(deepest))
        reached = [junction for junction in self._junctions if junction.layers <= deepest]
        routers = sum(junction.router.nbytes for junction in reached)
        left = {junction.adapter.nbytes for junction in self._junctions if junction.layers in depths}
        return blocks + routers + max(left, default=0) + self._decoder.head.nbytes

    def of_pass(self, depths: Sequence[int], length: int) -> int:
        """See `Traffic.of_pass`; layers above a row's exit are not among them."""
        return self.weights(depths) + sum(self.keys_values(length, depth) for depth in depths)


def traffic_of(model: Model) -> Traffic | None:
    """What passes of `model` read; None where the depths of tokens do not tell (drafts, blocks that are streamed)."""
    match model:
        case River(decoder=Decoder(blocks=StreamedBlocks())) | Dense(decoder=Decoder(blocks=StreamedBlocks())):
            return None
        case River():
            return Traffic(model.decoder, model.exits)
        case Nvium():
            return MixtureTraffic(model.decoder, model.junctions)
        case Dense():
            return Traffic(model.decoder)
        case _:
            return None


def block_bytes(block: Block) -> int:
    """Bytes of a block's matrices, biases and norms as they are in memory."""
    return sum(linear.nbytes for linear in _linears(block)) + sum(weight.nbytes for weight in _norms(block))


def _linears(block: Block) -> Iterator[Linear]:
    for part in (block.qkv, block.gate_up):
        yield from cast("Sequence[Linear]", getattr(part, "linears", ()))
    yield from (block.output, block.down)


def _norms(block: Block) -> Iterator[Tensor]:
    norms = block.norms
    for norm in (norms.before_attention, norms.before_mlp, norms.after_attention, norms.after_mlp):
        if norm is not None:
            yield norm.weight


def _keys(arch: Architecture, itemsize: int) -> Iterator[tuple[int, int, int | None]]:
    """Each layer that keeps a cache, the bytes of one token's keys and values, and how far back its readers look."""
    token = 2 * arch.num_kv_heads * arch.head_dim * itemsize
    for layer in range(arch.num_layers):
        if arch.has_kv(layer):
            readers = (arch.layers[at].window for at, source in enumerate(arch.kv_sources) if source == layer)
            windows = list(readers)
            yield layer, token, None if None in windows else max(window for window in windows if window is not None)
