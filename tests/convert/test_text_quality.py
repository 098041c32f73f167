"""`eval --text` on bundles made by the recipes, against transformers and against the runtime itself."""

import math
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from adapt_llm.convert.rcla import build as build_rcla
from adapt_llm.convert.rcla import plan as plan_rcla
from adapt_llm.convert.rcla_request import RclaSettings
from adapt_llm.convert.request import ConvertRequest
from adapt_llm.convert.river import build, plan
from adapt_llm.convert.river_request import RiverSettings
from adapt_llm.errors import UsageError
from adapt_llm.quant.kernels import native8
from adapt_llm.runtime.bundle import Bundle
from adapt_llm.runtime.loading import load_river
from adapt_llm.runtime.models import load_model
from adapt_llm.runtime.options import SessionOptions
from adapt_llm.runtime.pass_store import PassStore
from adapt_llm.runtime.progress import SilentReporter
from adapt_llm.runtime.text import Tokenizer
from adapt_llm.runtime.text_quality import TextQuality, text_quality, windows

TEXT = "The quick brown fox jumps over the lazy dog, and 한국어 문장도 하나. " * 9
LENGTH = 40
FP32 = {"dtype": "fp32", "device": "cpu"}


def measure(bundle: Bundle, text: str = TEXT, *, limit: int | None = None, **options) -> TextQuality:
    options = SessionOptions(**{"ctx_size": LENGTH, **FP32, **options})
    return text_quality(bundle, text, options, limit=limit, reporter=SilentReporter())


@pytest.fixture(scope="module")
def river(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    settings = RiverSettings(quantizer="rtn", group_size=32, calibration_tokens=512, tau=0.8)
    output = tmp_path_factory.mktemp("river") / "out"
    request = ConvertRequest(source=str(tiny_llama), output=output, settings=settings, threads=1)
    return Bundle.open(build(plan(request, SilentReporter()), SilentReporter()))


@pytest.fixture(scope="module")
def shared(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    output = tmp_path_factory.mktemp("rcla") / "out"
    request = ConvertRequest(
        source=str(tiny_llama), output=output, settings=RclaSettings(share_every=2), untrained=True, threads=1
    )
    return Bundle.open(build_rcla(plan_rcla(request, SilentReporter()), SilentReporter()))


@given(st.integers(2, 60), st.integers(3, 12), st.sampled_from([None, 1]))
def test_every_token_is_predicted_once(count: int, length: int, bos: int | None) -> None:
    ids = list(range(100, 100 + count))
    rows = [row.tolist() for part in windows(ids, length, bos) for row in part]
    assert all(len(row) <= length for row in rows)
    if bos is not None:
        assert all(row[0] == bos for row in rows)
        assert [index for row in rows for index in row[1:]] == ids
    else:  # a single token left over has nothing to be predicted from
        assert [index for row in rows for index in row] == ids[: count - (count % length == 1)]


@pytest.mark.skipif(not native8.available(), reason="no 8-bit product here")
def test_full_depth_keeps_its_head_beside_a_rounded_one(river: Bundle) -> None:
    sixteen, eight = (measure(river, limit=80, tau=1.0, dtype="bf16", head_bits=bits) for bits in (16, 8))
    assert (sixteen.kl, sixteen.perplexity) == (0.0, sixteen.dense_perplexity)
    assert eight.dense_perplexity == sixteen.dense_perplexity
    assert eight.perplexity != sixteen.perplexity
    assert eight.kl > 0


def test_figures_are_those_of_transformers_and_of_the_river(river: Bundle, tiny_llama: Path) -> None:
    found = measure(river)
    reference = transformers.AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    model, ids = load_river(river, SessionOptions(**FP32)), Tokenizer.load(river.path).encode(TEXT)
    sums = dict.fromkeys(("tokens", "dense", "own", "kl", "same", "depth"), 0.0)
    with torch.inference_mode():
        for start in range(0, len(ids), LENGTH):
            row = torch.tensor([ids[start : start + LENGTH]])
            decoder, wanted = model.decoder, row[0, 1:]
            h, depths = model.climb_rows(decoder.embed(row), decoder.step(None, row), PassStore(decoder.arch))
            own, dense = decoder.logits(h)[0, :-1], reference(row).logits[0, :-1]
            log_p, log_q = dense.log_softmax(-1), own.log_softmax(-1)
            sums["tokens"] += len(wanted)
            sums["dense"] += float(cross_entropy(dense, wanted, reduction="sum"))
            sums["own"] += float(cross_entropy(own, wanted, reduction="sum"))
            sums["kl"] += float((log_p.exp() * (log_p - log_q)).sum())
            sums["same"] += int((dense.argmax(-1) == own.argmax(-1)).sum())
            sums["depth"] += int(depths.sum())
    count = sums["tokens"]
    assert found.tokens == count
    assert found.perplexity == pytest.approx(math.exp(sums["own"] / count), rel=1e-4)
    assert found.dense_perplexity == pytest.approx(math.exp(sums["dense"] / count), rel=1e-4)
    assert found.kl == pytest.approx(sums["kl"] / count, rel=1e-3)
    assert found.agreement == pytest.approx(sums["same"] / count, abs=1e-3)
    assert found.mean_depth == pytest.approx(sums["depth"] / len(ids))
    assert 1 < found.mean_depth < 4, "some tokens leave early, some late"
    assert sum(found.exit_histogram) == len(ids)


def test_the_first_token_of_each_sequence_stays(river: Bundle) -> None:
    """Leaving at once, what the first token predicts is the dense model's, and it alone runs all resident blocks."""
    tokens = len(Tokenizer.load(river.path).encode(TEXT))
    sequences = -(-tokens // LENGTH)
    found = measure(river, tau=-1.0)
    assert found.exit_histogram == [tokens - sequences, 0, 0, sequences]
    first = found.by_position[0]
    assert first.perplexity == pytest.approx(first.dense_perplexity, rel=1e-4)
    assert measure(river, tau=-1.0, resident=2).exit_histogram == [tokens - sequences, sequences, 0, 0]


def test_positions_cover_all_tokens(river: Bundle) -> None:
    found = measure(river)
    assert sum(part.tokens for part in found.by_position) == found.tokens
    assert [(part.first, part.last) for part in found.by_position][:3] == [(1, 1), (2, 3), (4, 7)]
    together = sum(part.tokens * math.log(part.perplexity) for part in found.by_position) / found.tokens
    assert math.exp(together) == pytest.approx(found.perplexity)


def test_a_threshold_of_one_is_the_dense_model(river: Bundle) -> None:
    found = measure(river, tau=1.0)
    assert found.perplexity == found.dense_perplexity
    assert (found.kl, found.agreement, found.mean_depth) == (0, 1, 4)


def test_dropped_blocks_leave_nothing_to_compare_with(river: Bundle) -> None:
    found = measure(river, resident=2, tau=1.0)
    assert (found.dense_perplexity, found.kl, found.agreement) == (None, None, None)
    assert found.mean_depth == 2


def test_a_shared_cache_has_no_dense_backbone(shared: Bundle) -> None:
    found = measure(shared)
    assert (found.dense_perplexity, found.kl, found.agreement, found.mean_depth) == (None, None, None, 4)
    decoder = load_model(shared, SessionOptions(**FP32)).decoder
    ids, total = Tokenizer.load(shared.path).encode(TEXT), 0.0
    with torch.inference_mode():
        for start in range(0, len(ids), LENGTH):
            row = torch.tensor([ids[start : start + LENGTH]])
            h = decoder.run(decoder.embed(row), decoder.step(None, row), PassStore(decoder.arch))
            total += float(cross_entropy(decoder.logits(h)[0, :-1], row[0, 1:], reduction="sum"))
    assert found.perplexity == pytest.approx(math.exp(total / found.tokens), rel=1e-4)


def test_limits(river: Bundle) -> None:
    assert measure(river, limit=LENGTH + 10).tokens == LENGTH - 1 + 9
    with pytest.raises(UsageError, match="less than two"):
        measure(river, "")
    with pytest.raises(UsageError, match="128"):
        measure(river, ctx_size=200)
