"""verify finds every kind of damage, and nothing in a sound bundle."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file, save_file

from adapt_llm.convert.writer import hash_file
from adapt_llm.errors import UsageError
from adapt_llm.runtime.architecture import Architecture
from adapt_llm.runtime.bundle import Bundle
from adapt_llm.runtime.progress import SilentReporter
from adapt_llm.runtime.tensors import river_tensors
from adapt_llm.runtime.verify import Verdict, verify

RIVER = "river-00001-of-00001.safetensors"
QUIET = SilentReporter()


@pytest.fixture
def copy(built: Path, tmp_path: Path) -> Path:
    return shutil.copytree(built, tmp_path / "copy")


def whats(verdict: Verdict) -> list[tuple[str, str]]:
    return [(problem.file, problem.what) for problem in verdict.problems]


def reseal(bundle: Path, name: str) -> None:
    """Make the manifest agree with a file that was changed, so that only its content is wrong."""
    data = json.loads((bundle / "adapt.json").read_text(encoding="utf-8"))
    data["files"][name] = hash_file(bundle / name).model_dump()
    (bundle / "adapt.json").write_text(json.dumps(data), encoding="utf-8")


def edit(bundle: Path, change: Callable[[dict[str, torch.Tensor]], None], name: str = RIVER) -> None:
    tensors = {key: value.clone() for key, value in load_file(bundle / name).items()}
    change(tensors)
    save_file(tensors, bundle / name)
    reseal(bundle, name)


def test_a_sound_bundle(built: Path) -> None:
    verdict = verify(built, reporter=QUIET, self_check=lambda _: [])
    assert verdict.as_dict() == {"ok": True, "files": 8, "tensors": 39 + 3 * 7 * 4, "problems": []}


@pytest.mark.parametrize("name", ["model-00002-of-00002.safetensors", RIVER, "tokenizer.json"])
def test_one_flipped_bit_in_any_file(copy: Path, name: str) -> None:
    data = bytearray((copy / name).read_bytes())
    data[-3] ^= 1
    (copy / name).write_bytes(data)
    called = []
    verdict = verify(copy, reporter=QUIET, self_check=lambda _: called.append(1) or [])
    assert (name, "has another sha256 than recorded") in whats(verdict)
    assert not verdict.ok
    assert not called


def test_missing_extra_and_short_files(copy: Path) -> None:
    (copy / "tokenizer.json").unlink()
    (copy / "stray.bin").write_bytes(b"x")
    (copy / ".gitattributes").write_bytes(b"x")
    (copy / "README.md").write_text("x", encoding="utf-8")
    assert set(whats(verify(copy, reporter=QUIET))) == {
        ("tokenizer.json", "is missing"),
        ("stray.bin", "is not in the manifest"),
        ("README.md", "has another size than recorded"),
    }


def test_a_missing_tensor(copy: Path) -> None:
    edit(copy, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.scales"))
    assert ("river", "model.layers.1.mlp.up_proj.scales is missing") in whats(verify(copy, reporter=QUIET))


def test_an_extra_tensor(copy: Path) -> None:
    edit(copy, lambda tensors: tensors.update(stray=torch.zeros(1)))
    assert ("river", "stray does not belong here") in whats(verify(copy, reporter=QUIET))


def test_a_misshapen_tensor(copy: Path) -> None:
    name = "model.layers.2.self_attn.q_proj.qweight"
    edit(copy, lambda tensors: tensors.update({name: tensors[name][:4].clone()}))
    assert ("river", f"{name} has shape (4, 64), not (8, 64)") in whats(verify(copy, reporter=QUIET))


def test_a_tensor_of_another_dtype(copy: Path) -> None:
    name = "model.layers.2.self_attn.q_proj.scales"
    edit(copy, lambda tensors: tensors.update({name: tensors[name].float()}))
    assert ("river", f"{name} is float32, not float16") in whats(verify(copy, reporter=QUIET))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite(copy: Path, value: float) -> None:
    """With a matching sha256, and in a layer that the self-check may never reach."""
    name, other = (f"model.layers.{layer}.mlp.up_proj.scales" for layer in (1, 3))

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name][0, 0] = tensors[other][-1, -1] = value

    edit(copy, change)
    called: list[int] = []
    verdict = verify(copy, reporter=QUIET, self_check=lambda _: called.append(1) or [])
    assert whats(verdict) == [(RIVER, f"tensor {each} holds numbers that are not finite") for each in (name, other)]
    assert not called


def test_the_backbone_is_looked_at_too(copy: Path) -> None:
    index = json.loads((copy / "model.safetensors.index.json").read_text(encoding="utf-8"))
    norm = "model.norm.weight"
    edit(copy, lambda tensors: tensors.update({norm: tensors[norm].int()}), index["weight_map"][norm])
    problems = whats(verify(copy, reporter=QUIET))
    assert problems == [("backbone", f"{norm} is int32, not bfloat16, float16, float32")]


def test_an_unreadable_manifest_is_a_problem(copy: Path) -> None:
    (copy / "adapt.json").write_text("{", encoding="utf-8")
    verdict = verify(copy, reporter=QUIET)
    assert [problem.file for problem in verdict.problems] == ["adapt.json"]


def test_the_self_check_has_the_last_word(built: Path) -> None:
    def check(bundle: Bundle) -> list[str]:
        return [f"{bundle.manifest.base.id} talks nonsense"]

    assert whats(verify(built, reporter=QUIET, self_check=check)) == [("self-check", "example/tiny talks nonsense")]


def test_no_bundle_at_all(source: Path) -> None:
    with pytest.raises(UsageError):
        verify(source, reporter=QUIET)


def test_expected_tensors_are_what_pack_gives(factory: ModuleType) -> None:
    arch = Architecture.from_config(factory.config())
    expected = river_tensors(arch, factory.river_settings(arch))
    given = {name: tensor for layer in (2, 3, 4) for name, tensor in factory.exit_layer(arch, layer)}
    assert {name: tuple(tensor.shape) for name, tensor in given.items()} == {n: s for n, (_, s) in expected.items()}
    assert all(tensor.dtype in expected[name][0] for name, tensor in given.items())
