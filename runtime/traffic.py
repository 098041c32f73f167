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

    def keys_values(self, length: int) -> int:
        """Bytes of keys and values of one row that attends to `length` tokens.

        Layers that read another's (R-CLA) are not counted again: this is the least that any pass must read.
        """
        return sum(size * min(length, window or length) for size, window in self._keys)

    def _size(self, block: Block) -> int:
        if id(block) not in self._sizes:
            self._sizes[id(block)] = block_bytes(block)
        return self._sizes[id(block)]


def traffic_of(model: Model) -> Traffic | None:
    """What passes of `model` read; None where the depths of tokens do not tell (drafts, blocks that are streamed)."""
    match model:
        case River(decoder=Decoder(blocks=StreamedBlocks())):
            return None
        case River():
            return Traffic(model.decoder, model.exits)
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


def _keys(arch: Architecture, itemsize: int) -> Iterator[tuple[int, int | None]]:
    """Of each layer that keeps a cache: bytes of one token's keys and values, and how far back its readers look."""
    token = 2 * arch.num_kv_heads * arch.head_dim * itemsize
    for layer in range(arch.num_layers):
        if arch.has_kv(layer):
            readers = (arch.layers[at].window for at, source in enumerate(arch.kv_sources) if source == layer)
            windows = list(readers)
            yield token, None if None in windows else max(window for window in windows if window is not None)
