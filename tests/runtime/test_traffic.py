"""What a decode pass must read, and how fast this machine reads."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from adapt_llm.runtime.bandwidth import MemoryReader
from adapt_llm.runtime.bundle import Bundle
from adapt_llm.runtime.dense import Dense
from adapt_llm.runtime.junctions import Junctions, junction_tensors
from adapt_llm.runtime.models import load_model
from adapt_llm.runtime.nvium import Nvium
from adapt_llm.runtime.offload import StreamedBlocks
from adapt_llm.runtime.options import SessionOptions
from adapt_llm.runtime.traffic import Traffic, block_bytes, traffic_of


def test_passes_read_each_weight_once(built: Path) -> None:
    model: Any = load_model(Bundle.open(built), SessionOptions())
    for block in [*model.decoder.blocks, *model.exits[1:]]:
        for linear in (*block.qkv.linears, block.output, *block.gate_up.linears, block.down):
            getattr(linear, "prepare", lambda: None)()
    traffic = traffic_of(model)
    assert traffic is not None
    arch = model.decoder.arch
    dense = sum(2 * torch.Size(shape).numel() for shape in arch.block_tensors(0).values())
    head = 2 * arch.vocab_size * arch.hidden_size
    packed = block_bytes(model.exits[1])
    assert dense / 4 < packed < dense / 2
    assert traffic.weights([4]) == 4 * dense + head
    assert traffic.weights([1]) == dense + 3 * packed + head
    assert traffic.weights([1, 4, 2]) == 4 * dense + 3 * packed + head
    assert traffic.keys_values(10) == 10 * arch.kv_bytes(2)


def test_blocks_that_are_streamed_have_no_such_sum(tiny_model: Callable[[str], Any]) -> None:
    decoder = copy.copy(tiny_model("llama").decoder)
    assert traffic_of(Dense(decoder)) is not None
    blocks = decoder.blocks
    decoder.blocks = StreamedBlocks(blocks[:1], len(blocks), lambda index: blocks[index], torch.device("cpu"))
    assert traffic_of(Dense(decoder)) is None


def test_shared_keys_are_read_once_and_windows_end_them(tiny_model: Callable[[str], Any]) -> None:
    decoder = tiny_model("llama").decoder
    arch = decoder.arch
    shared = arch.share([0] * arch.num_layers)
    own = Traffic(decoder)
    decoder_of = type("D", (), {"arch": shared, "dtype": decoder.dtype})
    assert Traffic(decoder_of()).keys_values(6) * arch.num_layers == own.keys_values(6)
    windowed = tiny_model("mistral").decoder
    window = windowed.arch.layers[0].window
    assert window is not None
    assert Traffic(windowed).keys_values(5 * window) == Traffic(windowed).keys_values(window)


def test_a_mixture_reads_up_to_where_its_rows_left(tiny_model: Callable[[str], Any]) -> None:
    decoder = tiny_model("llama").decoder
    arch = decoder.arch
    points = tuple(range(1, arch.num_layers))
    tensors = {
        name: torch.zeros(shape)
        for name, shape in junction_tensors(arch, len(points), width=16, final_adapter=False).items()
    }
    model = Nvium(decoder, Junctions.of(arch, points, tensors))
    traffic = traffic_of(model)
    assert traffic is not None
    block, head = block_bytes(decoder.blocks[0]), decoder.head.nbytes
    router, adapter = model.junctions[0].router.nbytes, model.junctions[0].adapter.nbytes
    assert min(router, adapter) > 0
    assert traffic.weights([1]) == block + router + adapter + head
    everything = arch.num_layers * block + len(points) * router + head
    assert traffic.weights([arch.num_layers]) == everything
    assert traffic.weights([1, arch.num_layers]) == everything + adapter
    one_layer = arch.kv_bytes(decoder.dtype.itemsize) // arch.num_layers
    assert traffic.of_pass([1], 5) == traffic.weights([1]) + 5 * one_layer


def test_a_reading_is_of_the_whole_buffer() -> None:
    reader = MemoryReader(torch.device("cpu"), 1 << 20)
    assert 1e6 < reader.bytes_per_second() < 1e13
