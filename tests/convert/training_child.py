"""Runs of the training loop in processes of their own: killed on the way, or two under torchrun."""

import json
import os
import random
import sys
from pathlib import Path

import torch

from adapt_llm.convert.sequences import Batch
from adapt_llm.convert.trainable import MemoryStore, Trainable
from adapt_llm.convert.training import train
from adapt_llm.convert.training_settings import TrainingSettings
from adapt_llm.runtime.architecture import Architecture
from adapt_llm.runtime.progress import SilentReporter

CONFIG = {
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


class RandomTokens:
    """Twelve sequences, the same in every process."""

    def __init__(self) -> None:
        self._ids = torch.randint(0, 40, (12, 10), generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return len(self._ids)

    def batch(self, indices: list[int]) -> Batch:
        rows = self._ids[indices]
        return Batch(rows[:, :-1], rows[:, 1:].contiguous(), (9,) * len(indices))


def model() -> Trainable:
    arch = Architecture.from_config(CONFIG)
    generator = torch.Generator().manual_seed(5)
    tensors = {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in arch.tensors().items()}
    return Trainable(arch, MemoryStore(tensors))


def random_sources(model: Trainable, batch: Batch, draws: random.Random) -> tuple[torch.Tensor, int]:
    """An objective with chance in it, as R-CLA has."""
    sources = [draws.randint(0, layer) for layer in range(model.arch.num_layers)]
    return model(batch.ids, batch.targets, batch.counts, sources), batch.counted


SETTINGS = TrainingSettings(
    steps=8, learning_rate=3e-3, batch_size=4, micro_batch=1, warmup=0.25, seed=7, checkpoint_steps=3
)


def main() -> None:
    """FOLDER RESULT [STEP]: train, write the history, and die without a word after STEP steps."""
    folder, result, *stop = sys.argv[1:]
    torch.set_num_threads(1)
    last = int(stop[0]) if stop else None
    seen = {"passes": 0}

    def objective(model: Trainable, batch: Batch, draws: random.Random) -> tuple[torch.Tensor, int]:
        seen["passes"] += 1
        if last is not None and seen["passes"] > last * SETTINGS.batch_size + 2:  # in the middle of a step
            os.kill(os.getpid(), 9)
        return random_sources(model, batch, draws)

    history = train(model(), RandomTokens(), SETTINGS, objective, Path(folder), reporter=SilentReporter())
    if os.environ.get("RANK", "0") == "0":
        Path(result).write_text(json.dumps(history.to_json()), encoding="utf-8")


if __name__ == "__main__":
    main()
