"""Exit layers from a GPTQ checkpoint that somebody else made (`--river-from`), read without loss.

Knows the packed layout only through `quant.layout`. Rounds nothing: what the file says is what the river computes with.
"""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from ..errors import FormatError, UnsupportedError
from ..quant.layout import Int4Matrix, read_zeros
from ..runtime.architecture import Architecture
from ..runtime.exit_layers import MATRIX_PARTS, read_matrix
from ..runtime.progress import Task
from .quantise import Job, packed, piece_name
from .source_gptq import GptqCheckpoint
from .writer import write_piece


def take_ready_made(
    job: Job, checkpoint: GptqCheckpoint, indices: Sequence[int], task: Task, *, float_zeros: bool
) -> None:
    """Write the exit layers of `indices` from the checkpoint. UnsupportedError for numbers our layout cannot hold.

    `float_zeros` is what `needs_float_zeros` said when the conversion was planned.
    """
    for index in indices:
        if not job.work.has(piece_name(index)):
            shapes = job.arch.block_matrices(index)
            write_piece(job.work, piece_name(index), _packed(checkpoint, shapes, float_zeros=float_zeros))
            _release(checkpoint, shapes)
        task.advance(1)


def needs_float_zeros(arch: Architecture, checkpoint: GptqCheckpoint, indices: Sequence[int]) -> bool:
    """Return whether some zero is outside 1..15, which the v1 layout that we write cannot hold as an integer."""
    return any(_odd_zeros(checkpoint, name) for index in indices for name in arch.block_matrices(index))


def _odd_zeros(checkpoint: GptqCheckpoint, name: str) -> bool:
    stem, settings = _stem(checkpoint, name), checkpoint.settings
    if stem + "zeros" in checkpoint.store.names():
        return True
    stored = checkpoint.store.read(stem + "qzeros")
    zeros = read_zeros(stored, settings.symmetric, settings.checkpoint_format)
    return int(zeros.min()) < 1 or int(zeros.max()) > 15


def _packed(checkpoint: GptqCheckpoint, shapes: dict[str, tuple[int, int]], *, float_zeros: bool) -> dict[str, Tensor]:
    try:
        matrices = {name: _matrix(checkpoint, name, shape) for name, shape in shapes.items()}
        if float_zeros:
            matrices = {name: replace(matrix, zeros=matrix.zeros.float()) for name, matrix in matrices.items()}
        return packed(matrices)
    except ValueError as error:
        hint = "Quantise the model again, or leave out --river-from."
        raise UnsupportedError(f"{checkpoint.name} cannot be taken over: {error}", hint) from error


def _matrix(checkpoint: GptqCheckpoint, name: str, shape: tuple[int, int]) -> Int4Matrix:
    stem, settings = _stem(checkpoint, name), checkpoint.settings
    matrix = read_matrix(
        checkpoint.store, name, symmetric=settings.symmetric, checkpoint_format=settings.checkpoint_format
    )
    if matrix.shape != shape:
        what = f"{stem}qweight of {checkpoint.name} is {matrix.shape}, the model's weight {shape}"
        raise FormatError(what, "Is it another model's?")
    return matrix


def _stem(checkpoint: GptqCheckpoint, name: str) -> str:
    stem = name.removesuffix("weight")
    if stem + "qweight" not in checkpoint.store.names():
        hint = "It must hold every block's matrices of the model in 4 bits."
        raise FormatError(f"{checkpoint.name} has no {stem}qweight", hint)
    return stem


def _release(checkpoint: GptqCheckpoint, shapes: dict[str, tuple[int, int]]) -> None:
    names = checkpoint.store.names()
    stems = [name.removesuffix("weight") for name in shapes]
    for name in (stem + part for stem in stems for part in MATRIX_PARTS if stem + part in names):
        checkpoint.store.release(name)
