"""Which models run their blocks in one native call; what the call computes is for tests/oracle/test_chain.py."""

from pathlib import Path

import torch

from adapt_llm.runtime.bundle import Bundle
from adapt_llm.runtime.models import load_dense, load_model
from adapt_llm.runtime.options import SessionOptions
from adapt_llm.runtime.river import River
from adapt_llm.runtime.stack import Stack


def test_what_is_loaded_to_generate_is_a_stack(built: Path) -> None:
    river = load_model(Bundle.open(built), SessionOptions(device="cpu"))
    assert isinstance(river, River)
    assert isinstance(river.decoder.blocks, Stack)
    assert isinstance(river.exits, Stack)
    assert isinstance(load_dense(Bundle.open(built), SessionOptions(device="cpu")).decoder.blocks, Stack)


def test_blocks_are_loaded_when_they_are_run(built: Path) -> None:
    """A stack is as lazy as the blocks that it is made of."""
    river = load_model(Bundle.open(built), SessionOptions(device="cpu", dtype="bf16"))
    assert isinstance(river, River)
    stack = river.decoder.blocks
    assert isinstance(stack, Stack)
    assert not any(stack._blocks._blocks)
    cache, ids = river.new_cache(1, 4), torch.tensor([[3]])
    river.decoder.run(river.decoder.embed(ids), river.decoder.step(cache, ids, layers=range(1)), cache, range(1))
    assert [block is not None for block in stack._blocks._blocks] == [True] + [False] * (len(stack) - 1)
