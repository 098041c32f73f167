"""The training loop: what a step does, resuming to the same bits, several processes."""

import importlib.util
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from adapt_llm.convert import checkpoint
from adapt_llm.convert.training import History, mean_loss, next_token, train
from adapt_llm.convert.training_settings import TrainingSettings
from adapt_llm.errors import AdaptError, FormatError, UsageError
from adapt_llm.runtime.progress import SilentReporter

CHILD = Path(__file__).with_name("training_child.py")


@pytest.fixture(scope="module")
def child() -> ModuleType:
    spec = importlib.util.spec_from_file_location("training_child", CHILD)
    module = importlib.util.module_from_spec(spec)
    sys.modules["training_child"] = module
    spec.loader.exec_module(module)
    return module


class Notes(SilentReporter):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)


def run(child: ModuleType, folder: Path, settings: TrainingSettings | None = None, **given) -> tuple[object, History]:
    model = given.pop("model", None) or child.model()
    objective = given.pop("objective", child.random_sources)
    given = {"reporter": SilentReporter(), **given}
    return model, train(model, child.RandomTokens(), settings or child.SETTINGS, objective, folder, **given)


def test_the_first_steps_are_those_of_plain_torch(child: ModuleType, tmp_path: Path) -> None:
    """Loss, warm-up, decay, clipping, weight decay of matrices alone: written out once more."""
    settings = replace(child.SETTINGS, batch_size=12, micro_batch=5, clip_norm=0.5)
    trained, history = run(child, tmp_path, settings, objective=next_token)
    model, data = child.model(), child.RandomTokens()
    batch = data.batch(list(range(12)))
    matrices = [p for p in model.parameters() if p.ndim > 1]
    norms = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95))
    rates = [0.5, 1.0, 1.0, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]
    for logged, rate in zip(history.steps, rates, strict=True):
        logits = model.decoder.logits(model.hidden(batch.ids))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for group in optimizer.param_groups:
            group["lr"] = rate * 3e-3
        optimizer.step()
        assert logged.loss == pytest.approx(loss.item(), rel=1e-5)
        assert logged.norm == pytest.approx(norm.item(), rel=1e-4)
        assert logged.rate == pytest.approx(rate * 3e-3)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(dict(trained.named_parameters())[name], parameter, rtol=1e-4, atol=1e-5)


def test_the_loss_falls(child: ModuleType, tmp_path: Path) -> None:
    before = mean_loss(child.model(), child.RandomTokens())
    settings = TrainingSettings(steps=60, learning_rate=1e-2, batch_size=12, warmup=0.1)
    model, history = run(child, tmp_path, settings, objective=next_token)
    assert history.steps[0].loss == pytest.approx(before, rel=1e-5)
    assert mean_loss(model, child.RandomTokens(), batch_size=5) < 0.6 * before
    assert history.tokens == 60 * 12 * 9


def test_small_passes_add_up_to_one(child: ModuleType, tmp_path: Path) -> None:
    settings = replace(child.SETTINGS, micro_batch=None)
    _, whole = run(child, tmp_path / "a", settings, objective=next_token)
    _, parts = run(child, tmp_path / "b", replace(settings, micro_batch=3), objective=next_token)
    assert [s.loss for s in whole.steps] == pytest.approx([s.loss for s in parts.steps], rel=1e-5)


def test_a_killed_run_goes_on_to_the_same_bits(child: ModuleType, tmp_path: Path) -> None:
    """Killed with signal 9, in the middle of the step after the fifth; the last checkpoint is of the third."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    whole_model, whole = run(child, tmp_path / "whole")
    arguments = [sys.executable, str(CHILD), str(tmp_path / "killed"), str(tmp_path / "unused"), "5"]
    assert subprocess.run(arguments, check=False, timeout=60).returncode == -9
    assert checkpoint.load(tmp_path / "killed").state["updates"] == 3
    model, history = run(child, tmp_path / "killed")
    torch.set_num_threads(threads)
    assert history.steps == whole.steps
    for name, tensor in whole_model.state().items():
        assert torch.equal(model.state()[name], tensor), name


def test_two_processes_train_as_one(child: ModuleType, tmp_path: Path) -> None:
    _, one = run(child, tmp_path / "one")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    result = tmp_path / "two.json"
    done = subprocess.run(
        [*launch, str(CHILD), str(tmp_path / "two"), str(result)],
        check=False, timeout=120, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    two = History.from_json(json.loads(result.read_text(encoding="utf-8")))
    assert [s.loss for s in two.steps] == pytest.approx([s.loss for s in one.steps], rel=1e-5)
    assert [s.norm for s in two.steps] == pytest.approx([s.norm for s in one.steps], rel=1e-4)
    assert two.tokens == one.tokens
    mine, theirs = (checkpoint.load(tmp_path / name).tensors["weight"] for name in ("one", "two"))
    for name, tensor in mine.items():
        torch.testing.assert_close(theirs[name], tensor, rtol=1e-3, atol=1e-5)


def test_a_finished_run_is_not_run_again(child: ModuleType, tmp_path: Path) -> None:
    model, history = run(child, tmp_path)

    def never(*_: object) -> tuple[torch.Tensor, int]:
        raise AssertionError("trained again")

    again, found = run(child, tmp_path, objective=never)
    assert found.steps == history.steps
    assert torch.equal(again.decoder.embedding, model.decoder.embedding)


def test_an_interrupted_run_keeps_its_last_step(child: ModuleType, tmp_path: Path) -> None:
    seen = []

    def interrupted(model, batch, draws) -> tuple[torch.Tensor, int]:
        seen.append(1)
        if len(seen) == 5 * 4 + 2:
            raise KeyboardInterrupt
        return child.random_sources(model, batch, draws)

    with pytest.raises(KeyboardInterrupt):
        run(child, tmp_path / "a", objective=interrupted)
    assert checkpoint.load(tmp_path / "a").state["updates"] == 5
    _, history = run(child, tmp_path / "a")
    assert history.steps == run(child, tmp_path / "b")[1].steps


def test_a_checkpoint_of_other_settings_is_refused(child: ModuleType, tmp_path: Path) -> None:
    run(child, tmp_path, key={"data": "a"})
    with pytest.raises(UsageError, match=r"learning_rate was 0\.003, is 0\.001"):
        run(child, tmp_path, replace(child.SETTINGS, learning_rate=1e-3), key={"data": "a"})
    with pytest.raises(UsageError, match="micro_batch was 1, is 2") as caught:  # as when there are fewer processes
        run(child, tmp_path, replace(child.SETTINGS, micro_batch=2), key={"data": "a"})
    assert "--micro-batch 1" in (caught.value.hint or "")
    with pytest.raises(UsageError, match="data was"):
        run(child, tmp_path, key={"data": "b"})
    run(child, tmp_path, replace(child.SETTINGS, log_every=1, checkpoint_minutes=None), key={"data": "a"})


def test_a_half_written_checkpoint_does_not_count(child: ModuleType, tmp_path: Path) -> None:
    run(child, tmp_path)
    (tmp_path / "checkpoint-00000099.part").mkdir()
    assert checkpoint.load(tmp_path).state["updates"] == 8
    assert len(list(tmp_path.glob("checkpoint-*[0-9]"))) == 1  # older ones are gone


def test_a_checkpoint_of_another_model_is_refused(child: ModuleType, tmp_path: Path) -> None:
    parameters = child.model().trained()
    optimizer = torch.optim.AdamW(parameters.values())
    checkpoint.save(tmp_path, 1, {"weight": {"other": torch.zeros(2)}}, {"updates": 0})
    with pytest.raises(FormatError, match="another model"):
        checkpoint.restore(optimizer, parameters, checkpoint.load(tmp_path))


def test_a_loss_that_is_no_number_stops(child: ModuleType, tmp_path: Path) -> None:
    def broken(model, batch, draws) -> tuple[torch.Tensor, int]:
        loss, terms = next_token(model, batch, draws)
        return loss * math.nan, terms

    with pytest.raises(AdaptError, match="step 1 is nan"):
        run(child, tmp_path, objective=broken)


def test_progress_says_loss_speed_and_time_left(child: ModuleType, tmp_path: Path) -> None:
    notes = Notes()
    settings = replace(child.SETTINGS, log_every=4, evaluate_every=4)
    _, history = run(child, tmp_path, settings, reporter=notes, evaluate=lambda model: {"loss": 1.5})
    assert [line.split()[1] for line in notes.lines] == ["1/8", "4/8", "4/8", "8/8", "8/8"]
    assert all(word in notes.lines[1] for word in ("loss", "tokens/s", "left"))
    assert "held out: loss 1.5" in notes.lines[2]
    assert history.evaluations == {4: {"loss": 1.5}, 8: {"loss": 1.5}}


def test_without_accelerate_it_says_what_to_install(
    child: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(AdaptError, match=r"pip install 'adapt-llm\[train\]'"):
        run(child, tmp_path)


@pytest.mark.parametrize(
    "wrong", [{"steps": 0}, {"learning_rate": 0.0}, {"warmup": 2.0}, {"micro_batch": 0}, {"batch_size": 0}]
)
def test_settings_that_mean_nothing_are_refused(wrong: dict) -> None:
    with pytest.raises(UsageError):
        TrainingSettings(**{"steps": 3, "learning_rate": 1e-3, **wrong})


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 200_000])
def test_a_checkpoint_with_a_damaged_state_is_named(tmp_path: Path, text: str) -> None:
    folder = checkpoint.save(tmp_path, 1, {"weight": {"other": torch.zeros(2)}}, {"updates": 0})
    (folder / "state.json").write_text(text, encoding="utf-8")
    with pytest.raises(FormatError, match=rf"{folder.name} is damaged.*Remove it"):
        checkpoint.load(tmp_path)
