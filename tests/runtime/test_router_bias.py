"""A bias on the routers' scores: the depth that is chosen after training."""

from types import ModuleType

import torch

from adapt_llm.runtime.architecture import Architecture
from adapt_llm.runtime.junctions import Junctions, start


def test_only_the_scores_move(factory: ModuleType) -> None:
    arch = Architecture.from_config(factory.config())
    tensors = start(arch, (1, 3), torch.ones(arch.hidden_size), 0, final_adapter=True)
    junctions = Junctions.of(arch, (1, 3), tensors)
    moved = junctions.shifted(0.75)
    h = torch.randn(2, 5, arch.hidden_size)
    assert moved.points == junctions.points
    assert moved.final is junctions.final
    for before, after in zip(junctions, moved, strict=True):
        (x, score), (same, shifted) = before.read(h), after.read(h)
        assert torch.equal(x, same)
        torch.testing.assert_close(shifted, score + 0.75)
    twice = moved.shifted(0.25)
    torch.testing.assert_close(twice[0].read(h)[1], junctions[0].read(h)[1] + 1.0)
