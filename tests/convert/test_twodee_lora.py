"""Fine-tuning for classification at every depth: the paper's loss, and a bundle made with it."""

import hashlib
import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from adapt_llm.convert import twodee
from adapt_llm.convert.adapters import Fitting
from adapt_llm.convert.request import ConvertRequest
from adapt_llm.convert.twodee import build, plan
from adapt_llm.convert.twodee_lora import (
    LAST_WEIGHT,
    OTHER_WEIGHT,
    Classified,
    LabelledDocuments,
    PrefixLoss,
    lora_settings,
    prefix_means,
)
from adapt_llm.convert.twodee_request import TwoDeeSettings
from adapt_llm.errors import UsageError
from adapt_llm.runtime.architecture import architecture_of
from adapt_llm.runtime.bundle import Bundle
from adapt_llm.runtime.documents import Document
from adapt_llm.runtime.methods import TwoDee
from adapt_llm.runtime.models import self_check
from adapt_llm.runtime.progress import SilentReporter
from adapt_llm.runtime.store import open_safetensors
from adapt_llm.runtime.verify import verify

DOCUMENTS = [
    Document((5, 6, 7, 8, 9, 10), (2, 3, 6)),
    Document((20, 21, 22), (3,)),
    Document((30, 31, 32, 33), (1, 4)),
]
LABELS = [0, 1, 1]


def test_a_prefix_is_the_mean_of_sentence_means() -> None:
    means = prefix_means((2, 3, 6))
    x = torch.tensor([1.0, 3.0, 8.0, 1.0, 2.0, 3.0])
    assert (means @ x).tolist() == pytest.approx([2.0, 5.0, 4.0])


@pytest.fixture
def model(tiny_llama: Path) -> Classified:
    store = open_safetensors(tiny_llama)
    arch = architecture_of(json.loads((tiny_llama / "config.json").read_text(encoding="utf-8")), store)
    return Classified(arch, store, Fitting(classes=2, hidden=8), lora_settings=lora_settings(4, 0))


def test_the_loss_is_that_of_the_paper(model: Classified) -> None:
    prefix, weights = [1, 2], (0.5, 2.0)
    data = LabelledDocuments(DOCUMENTS, LABELS, prefix)
    found, terms = PrefixLoss(weights)(model, data.batch([0, 1, 2]), random.Random(0))
    expected = torch.tensor(0.0)
    up, up_bias, down, down_bias = model.stack.parameters
    for document, label in zip(DOCUMENTS, LABELS, strict=True):
        ids = torch.tensor([[*prefix, *document.ids]])
        for layer, h in enumerate(model.states(ids, after=range(model.arch.num_layers))):
            rows, losses = h[0, len(prefix) :], []
            starts = (0, *document.ends[:-1])
            means = [rows[a:b].mean(0) for a, b in zip(starts, document.ends, strict=True)]
            for j in range(1, len(means) + 1):
                x = torch.stack(means[:j]).mean(0)
                x = x / (x.square().mean() + 1e-6).sqrt()
                logits = down[layer] @ (up[layer] @ x + up_bias[layer]).relu() + down_bias[layer]
                losses.append(-weights[label] * logits.log_softmax(-1)[label])
            share = LAST_WEIGHT if layer == model.arch.num_layers - 1 else OTHER_WEIGHT
            expected = expected + share * torch.stack(losses).mean()
    assert terms == len(DOCUMENTS)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    found.backward()
    assert all(parameter.grad is not None for parameter in model.trained().values())


@pytest.fixture
def request_for(tiny_llama: Path, tmp_path: Path):
    draw = random.Random(0)
    words = {"good": ("splendid", "wonderful"), "bad": ("boring", "dreadful")}
    labels = ["good", "bad"] * 24
    rows = [
        {"text": f"So we saw {number}: {draw.choice(words[label])}.", "label": label}
        for number, label in enumerate(labels)
    ]
    data = tmp_path / "train.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    def make(name: str = "out", source: Path = tiny_llama, **values) -> ConvertRequest:
        settings = TwoDeeSettings(data=data, prompt="Label: ", max_tokens=60, hidden=8, epochs=2, lora=2)
        return ConvertRequest(source=str(source), output=tmp_path / name, settings=settings, threads=1, **values)

    return make


def convert(request: ConvertRequest) -> Path:
    return build(plan(request, SilentReporter()), SilentReporter())


class KilledError(Exception):
    """Stands for a kill."""


def test_a_tuned_bundle(request_for, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = convert(request_for())
    settings = Bundle.open(folder).manifest.method(TwoDee)
    assert settings is not None
    assert settings.training is not None
    assert (settings.training.lora_rank, settings.training.steps) == (2, 5)
    before = load_file(tiny_llama / "model.safetensors")
    after = load_file(next(folder.glob("model-*.safetensors")))
    changed = {name.split(".")[-2] for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert changed == {"q_proj", "v_proj"}
    assert verify(folder, reporter=SilentReporter(), self_check=self_check).ok

    again = request_for("again")
    with monkeypatch.context() as patch:

        def killed(*_args, **_kwargs):
            raise KilledError

        patch.setattr(twodee, "write_features", killed)
        with pytest.raises(KilledError):
            convert(again)
    monkeypatch.setattr(twodee, "train", killed)  # finished already
    assert bytes_of(convert(again)) == bytes_of(folder)


def bytes_of(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def test_a_tuned_backbone_cannot_be_a_reference(request_for, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="reference"):
        plan(request_for(backbone="reference"), SilentReporter())
    assert not list(tmp_path.glob("*out*"))
