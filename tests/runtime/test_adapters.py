"""The classifiers behind the layers: their arithmetic, and every way in which their tensors can be wrong."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from adapt_llm.errors import FormatError
from adapt_llm.runtime.adapters import Adapters, adapter_shapes
from adapt_llm.runtime.store import open_safetensors

SHAPE = {"inputs": 6, "width": 5, "classes": 3}


def random_adapters(layers: int = 2) -> Adapters:
    return Adapters(
        torch.randn(layers, 5, 6), torch.randn(layers, 5), torch.randn(layers, 3, 5), torch.randn(layers, 3)
    )


def test_arithmetic() -> None:
    adapters, x = random_adapters(), torch.randn(4, 6)
    for layer in range(2):
        up = torch.nn.Linear(6, 5)
        down = torch.nn.Linear(5, 3)
        up.weight.data, up.bias.data = adapters.up_weight[layer], adapters.up_bias[layer]
        down.weight.data, down.bias.data = adapters.down_weight[layer], adapters.down_bias[layer]
        expected = torch.nn.Sequential(up, torch.nn.ReLU(), down, torch.nn.Softmax(-1))(x)
        torch.testing.assert_close(adapters.probabilities(layer, x), expected)
        half = adapters.probabilities(layer, x.to(torch.bfloat16))
        assert half.dtype is torch.float32


def test_saved_and_read(tmp_path: Path) -> None:
    adapters = random_adapters()
    save_file(adapters.tensors(), tmp_path / "model.safetensors")
    assert {name: tuple(t.shape) for name, t in adapters.tensors().items()} == adapter_shapes(2, **SHAPE)
    read = Adapters.read(open_safetensors(tmp_path), 2, **SHAPE)
    assert (read.layers, read.classes) == (2, 3)
    torch.testing.assert_close(read.tensors(), adapters.tensors(), rtol=0, atol=0)


def drop(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["adapters.1.down.bias"]


def add(tensors: dict[str, torch.Tensor]) -> None:
    tensors["adapters.2.down.bias"] = torch.zeros(3)


def misshape(tensors: dict[str, torch.Tensor]) -> None:
    tensors["adapters.0.up.weight"] = torch.zeros(6, 5)


def spoil(tensors: dict[str, torch.Tensor]) -> None:
    tensors["adapters.1.up.bias"][2] = float("nan")


def round_off(tensors: dict[str, torch.Tensor]) -> None:
    tensors["adapters.1.up.bias"] = tensors["adapters.1.up.bias"].to(torch.int32)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (drop, r"lack adapters\.1\.down\.bias"),
        (add, r"one too many: adapters\.2\.down\.bias"),
        (misshape, r"adapters\.0\.up\.weight is float32 \[6, 5\], not float32 \[5, 6\]"),
        (spoil, "no numbers"),
        (round_off, r"adapters\.1\.up\.bias is int32"),
    ],
)
def test_damaged(tmp_path: Path, damage: Callable[[dict[str, torch.Tensor]], None], message: str) -> None:
    tensors = random_adapters().tensors()
    damage(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(FormatError, match=message):
        Adapters.read(open_safetensors(tmp_path), 2, **SHAPE)
