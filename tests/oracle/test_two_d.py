"""Algorithm 1 with stored states, decision by decision against one that recomputes everything, on transformers' models.

The reference is unbatched and keeps nothing: for every cell it runs the text up to the sentence's end from the start.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from adapt_llm.convert.source import open_source
from adapt_llm.runtime import classify
from adapt_llm.runtime.adapters import Adapters
from adapt_llm.runtime.architecture import Architecture
from adapt_llm.runtime.classify import Classifier, Verdict
from adapt_llm.runtime.decoder import load_decoder
from adapt_llm.runtime.documents import Document, DocumentReader
from adapt_llm.runtime.pass_store import PassStore
from adapt_llm.runtime.schedule import Full, OneD, Rule, TwoD
from adapt_llm.runtime.store import open_safetensors
from adapt_llm.runtime.sweep import Sweep
from adapt_llm.runtime.text import Tokenizer

FAMILIES = "llama-llama3 llama-dynamic mistral ministral3 qwen2 qwen3-window gemma2 gemma3 phi3 phi3-longrope smollm3"
CLASSES, WIDTH = 3, 16
CLOSE = 1e-4  # confidences nearer to a threshold than this may fall on either side of it


def adapters_for(layers: int, hidden: int) -> Adapters:
    """Random classifiers that are sure at times and unsure at others."""
    generator = torch.Generator().manual_seed(layers)

    def random(*shape: int, scale: float) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * scale

    return Adapters(
        random(layers, WIDTH, hidden, scale=0.1) / torch.arange(1, layers + 1)[:, None, None],
        random(layers, WIDTH, scale=0.3),
        random(layers, CLASSES, WIDTH, scale=0.3),
        random(layers, CLASSES, scale=0.2),
    )


def document(sizes: Sequence[int], seed: int = 0) -> Document:
    """Random ids in sentences of these sizes."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 97, (sum(sizes),), generator=generator).tolist()
    return Document(tuple(ids), tuple(sum(sizes[: end + 1]) for end in range(len(sizes))))


@dataclass(frozen=True)
class Answer:
    label: int
    operations: int
    stopped: bool
    slack: float  # how near a decision was to falling otherwise


class Reference:
    """Algorithm 1 as the paper prints it."""

    def __init__(self, model: Any, adapters: Adapters, text: Document, prefix: Sequence[int], readout: str) -> None:
        self.model, self.adapters, self.text, self.prefix, self.readout = model, adapters, text, list(prefix), readout
        self.layers, self.sentences = model.arch.num_layers, len(text.ends)
        self.states = lru_cache(maxsize=None)(self._states)

    def _states(self, sentence: int) -> list[torch.Tensor]:
        """What every layer puts out for a text that ends with this sentence.

        longrope and dynamic NTK rotate by the length of the text, so that theirs is always whole.
        """
        whole = any(spec.kind in ("longrope", "dynamic") for spec in self.model.arch.ropes)
        ids = self.prefix + list(self.text.ids if whole else self.text.ids[: self.text.ends[sentence]])
        seen: list[torch.Tensor] = []
        blocks = self.model.reference.model.layers
        hooks = [
            block.register_forward_hook(lambda _m, _i, out: seen.append(out[0] if isinstance(out, tuple) else out))
            for block in blocks
        ]
        try:
            self.model.expected(torch.tensor([ids]))
        finally:
            for hook in hooks:
                hook.remove()
        return [states.reshape(len(ids), -1) for states in seen]

    def embedding(self, layer: int, sentence: int) -> torch.Tensor:
        start = self.text.ends[sentence - 1] if sentence else 0
        rows = self.states(sentence)[layer][len(self.prefix) :]
        return rows[start : self.text.ends[sentence]].mean(0)

    def probabilities(self, layer: int, x: torch.Tensor) -> list[float]:
        a = self.adapters
        middle = torch.relu(a.up_weight[layer] @ x + a.up_bias[layer])
        return torch.softmax(a.down_weight[layer] @ middle + a.down_bias[layer], 0).tolist()

    def read(self, layer: int) -> list[float]:
        """Probabilities of the answer that is given where no rule fires."""
        every = [self.embedding(layer, sentence) for sentence in range(self.sentences)]
        return self.probabilities(layer, every[-1] if self.readout == "last" else torch.stack(every).mean(0))

    def run(self, rule: Rule) -> Answer:
        L, m = self.layers, self.sentences
        delta = max(1, L // m)
        acc = [0.0] * CLASSES
        operations, slack = 0, inf
        for s in range(m):
            for s1 in range(s + 1):
                start = 0 if s1 == s else delta * s
                for layer in range(start, min((s + 1) * delta, L)):
                    operations += 1
                    p = self.probabilities(layer, self.embedding(layer, s1))
                    best = p.index(max(p))
                    first, second = sorted(p, reverse=True)[:2]
                    confidence = first - second
                    slack = min(slack, abs(confidence - rule.tau_ignore), confidence)
                    if confidence > rule.tau_ignore:
                        acc[best] += confidence
                    slack = min(slack, abs(acc[best] - rule.tau_acc) if acc[best] else inf)
                    if acc[best] > rule.tau_acc:
                        return Answer(best, operations, stopped=True, slack=slack)
        return self.last(L, slack)

    def last(self, depth: int, slack: float = inf) -> Answer:
        """The answer behind `depth` layers."""
        p = self.read(depth - 1)
        first, second = sorted(p, reverse=True)[:2]
        return Answer(p.index(first), depth * self.sentences, stopped=False, slack=min(slack, first - second))


@pytest.fixture(scope="session")
def deep_model(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Seven layers, so that sentences open several at once, and a window that most texts outgrow."""
    return make(tiny, "mistral", tmp_path_factory.mktemp("deep"), num_hidden_layers=7)


def make(tiny: ModuleType, name: str, folder: Path, **changes: Any) -> Any:
    case = tiny.Case(tiny.CASES[name].family, {**tiny.CASES[name].settings, **changes})
    reference = tiny.build(case)
    reference.save_pretrained(folder)
    arch = Architecture.from_config(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    store = open_safetensors(folder)
    return tiny.TinyModel(folder, reference, arch, store, load_decoder(arch, store, device="cpu", dtype=torch.float32))


def classifier(model: Any, prefix: Sequence[int] = (), readout: Any = "mean") -> Classifier:
    adapters = adapters_for(model.arch.num_layers, model.arch.hidden_size)
    return Classifier(model.decoder, adapters, prefix=prefix, readout=readout)


def same(verdict: Verdict, answer: Answer, cells: int) -> bool:
    """Label, operations and whether the rule fired."""
    found = (verdict.label, round(verdict.work * cells), verdict.stopped)
    return found == (answer.label, answer.operations, answer.stopped)


def check(model: Any, texts: Sequence[Document], rule: Rule, *, prefix: Sequence[int] = (), batch: int = 4) -> None:
    """Every document of a batch is decided as the reference decides it."""
    ours = classifier(model, prefix)
    verdicts = list(ours.classify(texts, TwoD(rule), batch_size=batch))
    compared = 0
    for text, verdict in zip(texts, verdicts, strict=True):
        answer = Reference(model, ours.adapters, text, prefix, "mean").run(rule)
        if answer.slack > CLOSE:
            compared += 1
            assert same(verdict, answer, model.arch.num_layers * len(text.ends)), (text.ends, verdict, answer)
    assert compared > len(texts) / 2


TEXTS = [document(sizes, seed) for seed, sizes in enumerate([[3], [2, 5, 1], [1] * 9, [17], [4, 1, 6, 2, 3], [2, 9]])]
RULES = [Rule(0.0, 0.0), Rule(0.2, 0.5), Rule(0.1, 1.5), Rule(0.3, 3.0), Rule(0.0, inf)]


@pytest.mark.parametrize("name", FAMILIES.split())
def test_decisions_of_every_family(name: str, tiny_model: Callable[[str], Any]) -> None:
    for rule in RULES[1:4]:
        check(tiny_model(name), TEXTS, rule, prefix=(1, 5, 9))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("prefix", [(), (1,), range(3, 14)], ids=["none", "bos", "long"])
def test_decisions_of_a_deep_model(deep_model: Any, rule: Rule, prefix: Sequence[int]) -> None:
    check(deep_model, TEXTS, rule, prefix=prefix)


SIZES = st.one_of(
    st.lists(st.integers(1, 6), min_size=1, max_size=5),
    st.lists(st.integers(1, 3), min_size=8, max_size=11),
    st.integers(1, 40).map(lambda n: [n]),
)


@settings(max_examples=25, deadline=None)
@given(sizes=SIZES, ignore=st.floats(0, 0.6), acc=st.floats(0, 6), seed=st.integers(0, 9))
def test_any_text_and_rule(deep_model: Any, sizes: list[int], ignore: float, acc: float, seed: int) -> None:
    text, rule = document(sizes, seed), Rule(ignore, acc)
    ours = classifier(deep_model, (7, 8))
    answer = Reference(deep_model, ours.adapters, text, (7, 8), "mean").run(rule)
    assume(answer.slack > CLOSE)
    (verdict,) = ours.classify([text], TwoD(rule), batch_size=1)
    assert same(verdict, answer, 7 * len(sizes))


@settings(max_examples=20, deadline=None)
@given(
    sizes=st.lists(SIZES, min_size=2, max_size=7),
    ignore=st.floats(0, 0.5),
    acc=st.floats(0, 4),
    batch=st.integers(2, 5),
    eager=st.booleans(),
    rows=st.sampled_from([1, 12, 4096]),
)
def test_a_document_in_any_batch_is_decided_as_alone(
    deep_model: Any, sizes: list[list[int]], ignore: float, acc: float, batch: int, eager: bool, rows: int
) -> None:
    ours = classifier(deep_model, (7, 8))
    texts, mode = [document(s, seed) for seed, s in enumerate(sizes)], TwoD(Rule(ignore, acc))
    alone = [verdict for text in texts for verdict in ours.classify([text], mode, batch_size=1)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(classify, "ROWS", rows)
        patch.setattr(classify, "Sweep", lambda *args: set_eager(Sweep(*args), eager))
        together = list(ours.classify(texts, mode, batch_size=batch))
    for text, one, other in zip(texts, alone, together, strict=True):
        answer = Reference(deep_model, ours.adapters, text, (7, 8), "mean").run(mode.rule)
        if answer.slack > CLOSE:
            for field in ("label", "work", "layers", "sentences"):
                assert getattr(one, field) == getattr(other, field)
            assert one.scores == pytest.approx(other.scores, abs=CLOSE)


def set_eager(sweep: Sweep, eager: bool) -> Sweep:
    """Votes behind every layer as on a CPU, or at the end of the passage as elsewhere."""
    sweep._eager = eager
    return sweep


@pytest.mark.parametrize("readout", ["mean", "last"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_out_of_reach_is_the_dense_answer(name: str, readout: str, tiny_model: Callable[[str], Any]) -> None:
    model = tiny_model(name)
    ours = classifier(model, (1, 4), readout)
    layers = model.arch.num_layers
    for mode, depth in [(TwoD(Rule(0.0, inf)), layers), (Full(), layers), (OneD(2), 2)]:
        for text, verdict in zip(TEXTS, ours.classify(TEXTS, mode, batch_size=4), strict=True):
            expected = Reference(model, ours.adapters, text, (1, 4), readout).read(depth - 1)
            assert verdict.scores == pytest.approx(expected, abs=CLOSE)
            assert (verdict.work, verdict.layers, verdict.sentences) == (depth / layers, depth, len(text.ends))
            assert verdict.computed == verdict.work  # no cell twice
            assert not verdict.stopped


REVIEWS = [
    "A slow start, but then it grips you. The two leads are superb! I have seen it three times now. Go and see it.",
    "Dreadful. Not one line of this script sounds like anything a person would say. I left after an hour.",
    "It is a film that one can watch and that one will forget",
]


@pytest.mark.model
@pytest.mark.slow
def test_reviews_on_a_real_model(models: Any, tmp_path: Path) -> None:
    source = open_source(str(models["smollm2-135m-instruct.gguf"]))
    arch = Architecture.from_config(source.config)
    decoder = load_decoder(arch, source.store, device="cpu", dtype=torch.float32)
    for name, data in source.text_files().items():
        (tmp_path / name).write_bytes(data if isinstance(data, bytes) else data.read_bytes())
    reader = DocumentReader(Tokenizer.load(tmp_path), max_tokens=256, least=10)
    adapters = adapters_for(arch.num_layers, arch.hidden_size)
    prefix = reader.prefix("Is this review positive or negative?\n")
    ours = Classifier(decoder, adapters, prefix=prefix)
    texts = [reader.read(review) for review in REVIEWS]
    assert len(texts[0].ends) > 2
    compared = 0
    for rule in (Rule(0.2, 0.6), Rule(0.05, 4.0), Rule(0.05, 12.0)):
        for text, verdict in zip(texts, ours.classify(texts, TwoD(rule), batch_size=2), strict=True):
            answer = Uncached(SimpleNamespace(arch=arch, decoder=decoder), adapters, text, prefix, "mean").run(rule)
            if answer.slack > CLOSE:
                compared += 1
                assert same(verdict, answer, arch.num_layers * len(text.ends))
    assert compared >= 5


class Uncached(Reference):
    """The same with our own forward, which test_logits and test_decoder hold against transformers'."""

    @torch.inference_mode()
    def _states(self, sentence: int) -> list[torch.Tensor]:
        ids = torch.tensor([self.prefix + list(self.text.ids[: self.text.ends[sentence]])])
        decoder = self.model.decoder
        h, step, store, seen = decoder.embed(ids), decoder.step(None, ids), PassStore(decoder.arch), []
        for block in decoder.blocks:
            h = block(h, step, store)
            seen.append(h[0])
        return seen
