"""Exit layers from a GPTQ checkpoint that somebody else made (`--river-from`), read without loss.

Knows the packed layout only through `quant.layout`. Rounds nothing: what the file says is what the river computes with.
"""

from collections.abc import Sequence
from dataclasses import replace

from ..errors import FormatError
from ..quant.layout import Int4Matrix
from ..runtime.architecture import Architecture
from ..runtime.exit_layers import read_matrix
from ..runtime.progress import Task
from .quantise import packed, piece_name
from .source_gptq import GptqCheckpoint
from .workspace import Workspace
from .writer import write_piece


def take_ready_made(
    work: Workspace, arch: Architecture, checkpoint: GptqCheckpoint, indices: Sequence[int], task: Task
) -> None:
    """Write the exit layers of `indices` from the checkpoint."""
    float_zeros = needs_float_zeros(arch, checkpoint, indices)
    for index in indices:
        if not work.has(piece_name(index)):
            matrices = {name: _matrix(checkpoint, name, shape) for name, shape in arch.block_matrices(index).items()}
            if float_zeros:
                matrices = {name: replace(matrix, zeros=matrix.zeros.float()) for name, matrix in matrices.items()}
            write_piece(work, piece_name(index), packed(matrices))
        task.advance(1)


def needs_float_zeros(arch: Architecture, checkpoint: GptqCheckpoint, indices: Sequence[int]) -> bool:
    """Return whether some zero is outside 1..15, which the v1 layout that we write cannot hold as an integer."""
    names = (item for index in indices for item in arch.block_matrices(index).items())
    zeros = (_matrix(checkpoint, name, shape).zeros for name, shape in names)
    return any(z.dtype.is_floating_point or int(z.min()) < 1 or int(z.max()) > 15 for z in zeros)


def _matrix(checkpoint: GptqCheckpoint, name: str, shape: tuple[int, int]) -> Int4Matrix:
    stem = name.removesuffix("weight")
    if stem + "qweight" not in checkpoint.store.names():
        raise FormatError(
            f"{checkpoint.name} has no {stem}qweight", "It must hold every block's matrices of the model in 4 bits."
        )
    settings = checkpoint.settings
    matrix = read_matrix(
        checkpoint.store, name, symmetric=settings.symmetric, checkpoint_format=settings.checkpoint_format
    )
    if matrix.shape != shape:
        raise FormatError(
            f"{stem}qweight of {checkpoint.name} is {matrix.shape}, the model's weight {shape}", "Another model?"
        )
    return matrix
