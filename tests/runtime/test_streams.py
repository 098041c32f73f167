"""Blocks streamed to a GPU, without one: which stream waits for what, and that the host's copies are pinned once."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from adapt_llm.runtime.loading import Placement, _PinnedStore
from adapt_llm.runtime.offload import TRAVELLING, StreamedBlocks

DEVICE = torch.device("cuda:1")


class FakeStream:
    """A stream that writes down what it is asked."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self._log = name, log

    def wait_stream(self, other: "FakeStream") -> None:
        self._log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: "FakeEvent") -> None:
        self._log.append(f"{self.name} waits for copy {event.number}")


class FakeEvent:
    """An event that knows which copy it stands behind."""

    def __init__(self, log: list[str]) -> None:
        self._log, self.number = log, -1

    def record(self, stream: FakeStream) -> None:
        self.number = int(self._log[-1].split()[1])
        assert stream.name == "second"


class Gpu:
    """Enough of torch.cuda for streams."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.inside = False
        monkeypatch.setattr(torch.cuda, "Stream", self._second)
        monkeypatch.setattr(torch.cuda, "Event", lambda: FakeEvent(self.log))
        monkeypatch.setattr(torch.cuda, "current_stream", self._current)
        monkeypatch.setattr(torch.cuda, "stream", self._on)

    def _second(self, device: torch.device) -> FakeStream:
        assert device == DEVICE
        return FakeStream("second", self.log)

    def _current(self, device: torch.device) -> FakeStream:
        assert device == DEVICE, "the reading stream is that of the blocks' device, not of the current one"
        return FakeStream("reader", self.log)

    @contextmanager
    def _on(self, stream: FakeStream) -> Iterator[None]:
        assert stream.name == "second"
        self.inside = True
        yield
        self.inside = False

    def fetch(self, index: int) -> str:
        assert self.inside, "copies are made on the second stream"
        self.log.append(f"copy {index}")
        return f"block {index}"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


def test_each_copy_travels_beside_the_block_before_it(gpu: Gpu) -> None:
    blocks = StreamedBlocks(["block 0", "block 1"], 5, gpu.fetch, DEVICE)
    for index in range(5):
        assert blocks[index] == f"block {index}"
        gpu.log.append(f"run {index}")
    assert gpu.log == [
        "run 0",
        "second waits for reader",
        "copy 2",
        "run 1",
        "reader waits for copy 2",
        "second waits for reader",
        "copy 3",
        "run 2",
        "reader waits for copy 3",
        "second waits for reader",
        "copy 4",
        "run 3",
        "reader waits for copy 4",
        "run 4",
    ]


def test_memory_is_reused_only_behind_the_work_that_reads_it(gpu: Gpu) -> None:
    """The copy that may take the memory of block n - 1 is made after the reader was given that block's work."""
    blocks = StreamedBlocks([], 6, gpu.fetch, DEVICE)
    for index in range(6):
        blocks[index]
        gpu.log.append(f"run {index}")
    for index in range(1, 5):
        copy = gpu.log.index(f"copy {index + 1}")
        assert gpu.log.index(f"run {index - 1}") < copy - 1
        assert gpu.log[copy - 1] == "second waits for reader"
        assert copy < gpu.log.index(f"run {index}"), "it is on its way before this block is asked to run"


def test_a_token_that_leaves_early_wastes_one_copy_and_the_next_token_begins_anew(gpu: Gpu) -> None:
    blocks = StreamedBlocks(["block 0"], 4, gpu.fetch, DEVICE)
    for depth in (2, 1, 3):
        assert [blocks[index] for index in range(depth)] == [f"block {index}" for index in range(depth)]
    copies = [line for line in gpu.log if line.startswith("copy")]
    assert copies == ["copy 1", "copy 2", "copy 1", "copy 2", "copy 3"]


def test_at_most_so_many_blocks_are_there(gpu: Gpu) -> None:
    alive: set[int] = set()
    most = 0

    class Weights:
        def __init__(self, index: int) -> None:
            gpu.fetch(index)
            self.index = index
            alive.add(index)

        def __del__(self) -> None:
            alive.discard(self.index)

    for block in StreamedBlocks([], 8, Weights, DEVICE):  # the loop holds a block while it asks for the next
        most = max(most, len(alive))
        assert block.index in alive
    assert 1 < most <= TRAVELLING


class Store:
    """One tensor."""

    def __init__(self) -> None:
        self.reads = 0

    def read(self, name: str) -> torch.Tensor:
        self.reads += 1
        return torch.full((4,), 3.0)


def test_the_host_s_copy_is_pinned_once_and_sent_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned, sent, store = [], [], Store()
    plain = torch.Tensor.to

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(tensor.clone())
        return pinned[-1]

    def to(tensor: torch.Tensor, *args, **options) -> torch.Tensor:
        if options.get("non_blocking"):
            sent.append((tensor, args))
        return plain(tensor, *args, **options)

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.Tensor, "to", to)
    placed = _PinnedStore(store, Placement(torch.device("cpu"), torch.bfloat16))
    for _ in range(3):
        assert placed.read("w").dtype is torch.bfloat16
    assert (store.reads, len(pinned)) == (1, 1)
    assert all(tensor is pinned[0] and args == (torch.device("cpu"),) for tensor, args in sent)
    assert len(sent) == 3
