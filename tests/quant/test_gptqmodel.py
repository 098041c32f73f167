"""Files that GPTQModel 7.6 wrote, read as GPTQModel reads them (made by make_gptq_fixtures.py)."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from adapt_llm.quant.layout import pack, unpack
from adapt_llm.quant.linear import Int4Linear

VARIANTS = (
    "sym-g128-v1",
    "sym-g32-v2",
    "asym-g32-v1",
    "asym-g128-v2",
    "sym-row-v1",
    "sym-g32-v1-desc",
    "asym-g32-v2-desc",
)


@pytest.fixture(scope="module")
def samples():
    return load_file(Path(__file__).parent / "gptq.safetensors")


def read(samples, name):
    tensors = {key.partition("/")[2]: value for key, value in samples.items() if key.startswith(name + "/")}
    weight = tensors.pop("weight")
    label = "gptq_v2" if "v2" in name else "gptq"
    return tensors, unpack(tensors, symmetric=name.startswith("sym"), checkpoint_format=label), weight


@pytest.mark.parametrize("name", VARIANTS)
def test_weights_are_those_that_gptqmodel_reads(samples, name):
    _, matrix, weight = read(samples, name)
    assert torch.equal(matrix.dequantize(torch.float16)[:16], weight)
    assert (matrix.g_idx is not None) == name.endswith("desc")
    assert set(matrix.zeros.unique().tolist()) == {8} or name.startswith("asym")


@pytest.mark.parametrize("name", [name for name in VARIANTS if "v1" in name])
def test_v1_files_are_written_back_bit_for_bit(samples, name):
    tensors, matrix, _ = read(samples, name)
    packed = pack(matrix)
    assert packed.keys() == tensors.keys()
    for key, value in tensors.items():
        assert torch.equal(packed[key], value)


@pytest.mark.parametrize("name", [name for name in VARIANTS if name.startswith("sym")])
def test_a_wrong_label_on_a_symmetric_file_does_no_harm(samples, name):
    tensors, _, weight = read(samples, name)
    for label in ("gptq", "gptq_v2", None):
        matrix = unpack(tensors, symmetric=True, checkpoint_format=label)
        assert torch.equal(matrix.dequantize(torch.float16)[:16], weight)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("rows", [1, 40])
def test_products_of_foreign_files(samples, name, rows):
    _, matrix, _ = read(samples, name)
    x = torch.randn(rows, matrix.shape[1], generator=torch.Generator().manual_seed(0)).bfloat16()
    out = Int4Linear([matrix], None, "cpu", torch.bfloat16)(x)
    expected = x.float() @ matrix.dequantize().t()
    assert (out.float() - expected).abs().max() <= 0.01 * expected.abs().max()
