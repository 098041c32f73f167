"""`adapt inspect` of an R-CLA bundle: the map drawn, how it was trained, what each size of cache gives."""

from collections.abc import Callable
from typing import Any

import pytest

from adapt_llm.cli import services
from adapt_llm.cli.inspect import layer_table

Invoke = Callable[..., tuple[int, str, str]]
LAYERS = [
    {"index": n, "dense": True, "exit_layer": False, "kv_source": source} for n, source in enumerate((1, 1, 1, 4, 5), 1)
]
TRAINING = {
    "data": {"name": "wiki.txt", "sha256": "0" * 64, "tokens": 900},
    "steps": 300,
    "tokens": 4800,
    "sequence_length": 1024,
    "sequences_per_step": 16,
    "learning_rate": 1e-4,
    "lora_rank": 8,
}


def facts(**method: Any) -> dict[str, Any]:
    rcla = {"name": "rcla", "kv_sources": [1, 1, 1, 4, 5], "share_every": None, "keep_ratio": 0.6, **method}
    return {
        "format_version": 1,
        "methods": [rcla],
        "base": {"id": "tiny", "revision": None},
        "layers": LAYERS,
        "bytes": {"kv_per_token": 384, "dense_kv_per_token": 640},
        "quality": None,
        "trained": True,
    }


def test_what_tune_chose_and_measured_is_said(adapt: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    quality = {"tokens": 90, "text": "t.txt", "perplexity": 9.0, "dense_perplexity": 8.0, "kl": 0.1, "agreement": 0.9}
    known = {**facts(), "quality": {**quality, "mean_depth": 2.0}}
    monkeypatch.setattr(services, "describe", lambda *_, **__: known)
    out = adapt("inspect", "b")[1]
    assert "quality, measured at conversion on 90 tokens of t.txt" in out
    assert "tuned" not in out
    known["tuned"] = {"chosen": "4 dense", "goal": "max_loss", "limit": 0.05, "data": {"name": "t.txt"}}
    out = adapt("inspect", "b")[1]
    assert "quality, measured when it was tuned on 90 tokens of t.txt" in out
    assert "tuned    4 dense, for max loss 0.05 on t.txt" in out


def test_leaders_and_followers_are_drawn() -> None:
    assert list(layer_table(LAYERS)) == [
        "          1  dense + leader",
        "        2-3  dense + keys and values of 1",
        "        4-5  dense",
    ]


def test_training_and_perplexity_by_cache(adapt: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        {"keepers": 5, "kv_sources": [1, 2, 3, 4, 5], "source": 20.0, "trained": 21.5},
        {"keepers": 3, "kv_sources": [1, 1, 1, 4, 5], "source": 30512.0, "trained": None},
    ]
    monkeypatch.setattr(services, "describe", lambda *_a, **_k: facts(training=TRAINING, retention=points))
    code, out, err = adapt("inspect", "b")
    assert (code, err) == (0, "")
    assert "300 steps of 16 x 1024 tokens from wiki.txt; LoRA of rank 8" in out
    rows = [line.split() for line in out.splitlines()]
    assert ["5", "of", "5", "layers", "(100%)", "20", "21.5"] in rows
    assert ["3", "of", "5", "layers", "(60%)", "3.051e+04"] in rows


def test_without_training_nothing_is_said_of_it(adapt: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "describe", lambda *_a, **_k: facts(training=None, retention=[]))
    out = adapt("inspect", "b")[1]
    assert "steps" not in out
    assert "held-out perplexity" not in out
