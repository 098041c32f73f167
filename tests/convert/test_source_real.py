"""The two real GGUF files, against what transformers 5.24 makes of them.

The figures below were taken from checkpoints that transformers dequantised from these very files (bfloat16, the tied
matrix from output.weight for Qwen) and from their tokenizers (with SmolLM's digit splitter, which transformers' own
reader of GGUF leaves out).
"""

import hashlib
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from adapt_llm.convert.source import open_source
from adapt_llm.runtime.progress import SilentReporter

TEXT = (
    "Hello world, it's 2024!  The year's   over: 1234567\ttabs\n\n\n  def f(x):\r\n    return x**2  # ½ naïve\n"
    "안녕하세요, 한국어 문장입니다. 😀👩‍👩‍👧 <|im_start|>user\nhi<|im_end|> \n "
)
SMOLLM2 = (
    "19556 905 28 357 506 216 34 32 34 36 17 216 378 713 506 256 690 42 216 33 34 35 36 37 38 39 197 100 7366 1116 "
    "3805 753 275 24 104 727 3136 1003 1792 828 34 216 907 216 16738 15486 46494 198 183 239 226 182 223 239 33085 "
    "242 183 222 133 183 244 238 28 216 33085 246 181 130 251 183 240 129 25947 122 133 183 248 115 183 248 223 "
    "41259 226 41259 114 30 40303 218 10813 235 119 321 231 10813 235 119 321 231 10813 235 117 216 1 4093 198 6004 "
    "2 3717 216"
)
QWEN = (
    "9707 1879 11 432 594 220 17 15 17 19 0 220 576 1042 594 256 916 25 220 16 17 18 19 20 21 22 3244 3435 1406 220 "
    "707 282 2075 5783 262 470 856 334 17 220 671 220 26062 94880 586 198 126246 144370 91145 11 130092 31079 53435 "
    "40853 78952 13 90316 145233 378 235 145233 378 235 145665 220 151644 872 198 6023 151645 715 220"
)
CASES = {
    "smollm2-135m-instruct.gguf": (
        SMOLLM2,
        "08587497151051bb64ba4ae8288856623bb8c6cd5dc22bb3bda06ebda07a1bcd",
        {"model_type": "llama", "rope_theta": 100000.0, "rms_norm_eps": 1e-5, "num_key_value_heads": 3},
        [2, 0],
    ),
    "qwen2.5-coder-0.5b-instruct.gguf": (
        QWEN,
        "eb8836dd3a6a7a6ddde3607a548e8c1f97ef8a99cc74451e3d05dfa334795074",
        {"model_type": "qwen2", "rope_theta": 1000000.0, "rms_norm_eps": 1e-6, "num_key_value_heads": 2},
        [151645, 151643],
    ),
}


class Notes(SilentReporter):
    def __init__(self) -> None:
        self.said: list[str] = []

    def note(self, text: str) -> None:
        self.said.append(text)


@pytest.mark.model
@pytest.mark.parametrize("name", CASES)
def test_tokenizer_and_config(models: dict[str, Path], name: str) -> None:
    text_ids, _, expected, ends = CASES[name]
    ids = [int(number) for number in text_ids.split()]
    source = open_source(str(models[name]))
    texts = source.text_files()
    tokenizer = Tokenizer.from_str(texts["tokenizer.json"].decode("utf-8"))
    assert tokenizer.encode(TEXT).ids == ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == TEXT
    assert b"<|im_start|>" in texts["chat_template.jinja"]
    assert source.config["tie_word_embeddings"] is True
    assert {key: source.config[key] for key in expected} == expected
    assert source.generation_config["eos_token_id"] == ends


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_weight(models: dict[str, Path], name: str) -> None:
    source = open_source(str(models[name]))
    digest = hashlib.sha256()
    for tensor in sorted(source.store.names()):
        digest.update(tensor.encode())
        digest.update(source.store.read(tensor).view(torch.int16).numpy())
        source.store.release(tensor)
    assert digest.hexdigest() == CASES[name][1]


@pytest.mark.model
def test_the_better_copy_of_the_tied_matrix_is_kept(models: dict[str, Path]) -> None:
    reporter = Notes()
    open_source(str(models["qwen2.5-coder-0.5b-instruct.gguf"]), reporter=reporter)
    assert ["output.weight (Q8_0) is kept" in note for note in reporter.said] == [True]
