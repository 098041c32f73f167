"""The small classifiers of 2D-EE: one per layer, from the mean state of a sentence to class probabilities.

Linear(hidden -> width), ReLU, Linear(width -> classes), softmax, in float32. Source: 2D-EE (arXiv 2604.18592),
section 3. Knows no documents and no schedule.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from ..errors import FormatError
from .store import TensorInfo, TensorStore

DAMAGED = "Convert the model again, or fetch the bundle again."


def adapter_shapes(layers: int, *, inputs: int, width: int, classes: int) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor; layers are counted from 0, as in the backbone's names."""
    parts = {
        "up.weight": (width, inputs),
        "up.bias": (width,),
        "down.weight": (classes, width),
        "down.bias": (classes,),
    }
    return {f"adapters.{layer}.{name}": shape for layer in range(layers) for name, shape in parts.items()}


@dataclass(frozen=True)
class Adapters:
    """Weights of all layers: up [L, width, hidden] and [L, width], down [L, classes, width] and [L, classes]."""

    up_weight: Tensor
    up_bias: Tensor
    down_weight: Tensor
    down_bias: Tensor

    @property
    def layers(self) -> int:
        """How many."""
        return self.up_weight.shape[0]

    @property
    def classes(self) -> int:
        """How many."""
        return self.down_bias.shape[1]

    def logits(self, layer: int, x: Tensor) -> Tensor:
        """Mean states x [n, hidden] behind `layer` (from 0) -> [n, classes], float32."""
        middle = linear(x.float(), self.up_weight[layer], self.up_bias[layer]).relu()
        return linear(middle, self.down_weight[layer], self.down_bias[layer])

    def probabilities(self, layer: int, x: Tensor) -> Tensor:
        """Mean states x [n, hidden] behind `layer` (from 0) -> [n, classes], float32, rows sum to 1."""
        return self.logits(layer, x).softmax(-1)

    def tensors(self) -> dict[str, Tensor]:
        """By name, as they are stored; see `adapter_shapes`."""
        stacked = {
            "up.weight": self.up_weight,
            "up.bias": self.up_bias,
            "down.weight": self.down_weight,
            "down.bias": self.down_bias,
        }
        return {
            f"adapters.{layer}.{name}": tensor[layer].float().contiguous()
            for layer in range(self.layers)
            for name, tensor in stacked.items()
        }

    @classmethod
    def read(
        cls,
        store: TensorStore,
        layers: int,
        *,
        inputs: int,
        width: int,
        classes: int,
        device: torch.device | str = "cpu",
    ) -> "Adapters":
        """Read all of them. Raises FormatError when a tensor is missing, left over, misshapen or holds no numbers."""
        expected = adapter_shapes(layers, inputs=inputs, width=width, classes=classes)
        _check(store, expected)

        def stack(part: str) -> Tensor:
            tensors = [store.read(f"adapters.{layer}.{part}") for layer in range(layers)]
            stacked = torch.stack(tensors).to(device, torch.float32)
            if not bool(stacked.isfinite().all()):
                raise FormatError(f"The adapters' {part} holds values that are no numbers", DAMAGED)
            return stacked

        return cls(stack("up.weight"), stack("up.bias"), stack("down.weight"), stack("down.bias"))


def _check(store: TensorStore, expected: dict[str, tuple[int, ...]]) -> None:
    names = set(store.names())
    for what, found in (("lack", expected.keys() - names), ("have one too many:", names - expected.keys())):
        if found:
            raise FormatError(f"The adapters {what} {min(found)}", DAMAGED)
    for name, shape in expected.items():
        info = store.info(name)
        if info != TensorInfo(shape, torch.float32):
            kinds = [
                f"{str(dtype).removeprefix('torch.')} {list(size)}"
                for dtype, size in ((info.dtype, info.shape), (torch.float32, shape))
            ]
            raise FormatError(f"{name} is {kinds[0]}, not {kinds[1]}", DAMAGED)
