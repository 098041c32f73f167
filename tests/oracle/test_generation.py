"""The token stream against transformers' generate: greedy, float32, through growing caches and changing rotations."""

from collections.abc import Callable

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import models as tokenizer_models

from adapt_llm.runtime.exits import FixedExit
from adapt_llm.runtime.generate import PromptCache, generate
from adapt_llm.runtime.river import River
from adapt_llm.runtime.sampling import Sampling
from adapt_llm.runtime.stops import Stops
from adapt_llm.runtime.text import Tokenizer

NEW = 40


def letters(size: int) -> Tokenizer:
    """A vocabulary of `size` one-character tokens."""
    return Tokenizer(Backend(tokenizer_models.WordLevel({chr(0x4E00 + i): i for i in range(size)}, "一")), {})


@pytest.mark.parametrize("name", ["llama", "qwen2", "mistral", "gemma2", "phi3-longrope"])
def test_greedy_tokens_are_those_of_transformers(name: str, tiny_model: Callable, tiny, monkeypatch) -> None:
    """phi3-longrope passes the length at which all keys are rotated anew."""
    monkeypatch.setattr("adapt_llm.runtime.generate._CAPACITY_STEP", 8)
    monkeypatch.setattr("adapt_llm.runtime.generate._SOON", 4)
    model, ids = tiny_model(name), tiny.random_ids(1, 10)
    river = River(model.decoder, (), FixedExit(model.arch.num_layers))
    tokenizer = letters(tiny.VOCABULARY)
    cache = PromptCache(river, 400)
    stream = generate(
        river,
        ids[0].tolist(),
        tokenizer=tokenizer,
        sampling=Sampling(temperature=0),
        stops=Stops.of(tokenizer, (), (), ignore_eos=True),
        cache=cache,
        max_tokens=NEW,
    )
    found = [record.id for record in stream]
    with torch.inference_mode():
        expected = model.reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=NEW,
            min_new_tokens=NEW,
            eos_token_id=-1,
        )
    assert found == expected[0, 10:].tolist()
    assert cache.kv is not None
    assert cache.kv.capacity == 64, "the cache grew as needed"
    assert cache.kv.lengths[0] == (10 + NEW - 1,)
