"""The River recipe from a tiny model to a bundle: whole, resumed, checked, refused, taken from ready-made weights."""

import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from adapt_llm.convert import quantise, writer
from adapt_llm.convert.calibration import load_calibration
from adapt_llm.convert.export import export
from adapt_llm.convert.judge import Verdict
from adapt_llm.convert.request import ConvertRequest
from adapt_llm.convert.river import build, plan
from adapt_llm.convert.river_request import RiverSettings
from adapt_llm.errors import FormatError, UnsupportedError, UsageError
from adapt_llm.runtime.bundle import Bundle
from adapt_llm.runtime.exits import FixedExit
from adapt_llm.runtime.loading import load_river
from adapt_llm.runtime.methods import River as Settings
from adapt_llm.runtime.options import SessionOptions
from adapt_llm.runtime.progress import SilentReporter
from adapt_llm.runtime.quality import Quality
from adapt_llm.runtime.river import River
from adapt_llm.runtime.self_check import compare, run_river_check
from adapt_llm.runtime.text import Tokenizer as OurTokenizer
from adapt_llm.runtime.verify import verify

LAYERS = 4
TEXT = "The quick brown fox jumps over the lazy dog, and 한국어 문장도 하나. " * 60


class Listening(SilentReporter):
    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warn(self, text: str) -> None:
        self.warnings.append(text)


@pytest.fixture
def request_for(tiny_llama: Path, tmp_path: Path):
    text = tmp_path / "text.txt"
    text.write_text(TEXT, encoding="utf-8")

    def make(name: str = "out", **river) -> ConvertRequest:
        settings = {"quantizer": "rtn", "group_size": 32, "calibration": text, "calibration_tokens": 512, **river}
        return ConvertRequest(
            source=str(tiny_llama), output=tmp_path / name, settings=RiverSettings(**settings), threads=1
        )

    return make


def convert(request: ConvertRequest, reporter=None) -> Path:
    reporter = reporter or SilentReporter()
    return build(plan(request, reporter), reporter)


def bytes_of(bundle: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(bundle.iterdir())}


@pytest.mark.parametrize("quantizer", ["rtn", "hqq", "gptq"])
def test_a_bundle_runs_as_the_model_with_dequantised_blocks(quantizer: str, request_for, tiny_llama: Path) -> None:
    path = convert(request_for(quantizer=quantizer))
    bundle = Bundle.open(path)
    model = load_river(bundle, SessionOptions(dtype="fp32", device="cpu"))
    reference = transformers.AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    ids = torch.randint(0, 256, (1, 20))
    with torch.inference_mode():
        for depth in (1, 2, LAYERS):
            river = River(model.decoder, model.exits, FixedExit(depth))
            out = river.prefill(ids, river.new_cache(1, 20))
            replaced = {name: tensor.clone() for name, tensor in reference.state_dict().items()}
            for index in range(depth, LAYERS):
                replaced |= {name: m.dequantize() for name, m in matrices_of(bundle, index).items()}
            oracle = transformers.LlamaForCausalLM(reference.config)
            oracle.load_state_dict(replaced)
            torch.testing.assert_close(out.logits, oracle.eval()(ids).logits[:, -1], atol=1e-4, rtol=1e-4)


def matrices_of(bundle: Bundle, index: int):
    from adapt_llm.runtime.exit_layers import read_matrix  # noqa: PLC0415 - beside its one use

    names = bundle.architecture.block_matrices(index)
    return {name: read_matrix(bundle.river, name, symmetric=False, checkpoint_format="gptq") for name in names}


def test_the_manifest_says_what_was_measured(request_for) -> None:
    path = convert(request_for(max_loss=10.0))
    manifest = Bundle.open(path).manifest
    river, quality = manifest.method(Settings), manifest.quality
    assert river is not None
    assert quality is not None
    assert river.exit_layers == (2, 3, 4)
    assert river.tau == 0.5, "the lowest threshold is good enough for a loss of 1000 %"
    assert [point.tau for point in river.tau_curve] == [0.5, 0.8, 0.9, 0.95, 0.98]
    assert river.max_loss == 10.0
    assert quality.dense_perplexity > 1
    assert 1 < quality.all_4bit["mean_depth"] < 1.05, "all but the first token of each sequence"
    assert 1 <= quality.mean_depth <= LAYERS
    assert sum(quality.exit_histogram) == quality.tokens
    assert verify(path, reporter=SilentReporter()).ok


def verdict(**losses: float) -> Verdict:
    """A curve with these losses at tau 0.5, 0.9, 0.98, above a dense perplexity of 10."""
    taus = {"low": 0.5, "middle": 0.9, "high": 0.98}
    at = {taus[name]: Quality(10 * (1 + value), 0.1, 0.9, 2.0, [0, 4, 0, 0]) for name, value in losses.items()}
    return Verdict(Quality(10.0, 0.0, 1.0, 4.0, [0, 0, 0, 4]), at[0.5], at)


@pytest.mark.parametrize(("allowed", "tau"), [(0.2, 0.5), (0.06, 0.9), (0.02, 0.98), (0.001, 0.98)])
def test_the_lowest_threshold_within_the_loss_is_chosen(allowed: float, tau: float, request_for, monkeypatch) -> None:
    measured = verdict(low=0.1, middle=0.05, high=0.01)
    monkeypatch.setattr("adapt_llm.convert.river.judge", lambda *_, **__: measured)
    heard = Listening()
    river = Bundle.open(convert(request_for(max_loss=allowed), heard)).manifest.method(Settings)
    assert river is not None
    assert river.tau == tau
    assert bool(heard.warnings) == (allowed < 0.01), "a loss that no threshold keeps is told"


def test_a_given_threshold_is_kept(request_for) -> None:
    river = Bundle.open(convert(request_for(tau=0.7))).manifest.method(Settings)
    assert river is not None
    assert (river.tau, river.max_loss, [point.tau for point in river.tau_curve]) == (0.7, None, [0.7])


def test_the_self_check_tells_damage_from_rounding(request_for) -> None:
    bundle = Bundle.open(convert(request_for()))
    recorded, tokenizer = bundle.manifest.self_check, OurTokenizer.load(bundle.path)
    assert recorded is not None
    model = load_river(bundle, SessionOptions(device="cpu"))
    assert not compare(recorded, run_river_check(model, tokenizer))
    for held in (0, 3):  # as recorded before tokens were held: the check asks the paper's rule
        other = River(model.decoder, model.exits, model.policy, held=held)
        assert run_river_check(other, tokenizer) == run_river_check(model, tokenizer)
    model.decoder.blocks[0].down.weight = model.decoder.blocks[0].down.weight.roll(1, 0)
    assert compare(recorded, run_river_check(model, tokenizer))


@pytest.mark.parametrize("bos", [False, True])
def test_sequences_begin_as_the_model_saw_texts_begin(bos: bool, tiny_llama: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_llama, tmp_path / "model")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<eos>", "bos_token": "<eos>", "add_bos_token": bos}), encoding="utf-8"
    )
    text = tmp_path / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    found = load_calibration(text, OurTokenizer.load(folder), tokens=300, max_positions=100)
    assert found.quantise.shape == (3, 100)
    assert [bool((rows[:, 0] == 256).all()) for rows in (found.quantise, found.judge)] == [bos, bos]
    assert not bool((found.quantise[:, 1:] == 256).any())


def test_the_quality_is_that_of_the_resident_blocks(request_for) -> None:
    """What the manifest says of a bundle with dropped blocks is what such a bundle does."""
    request = request_for(tau=1.0)
    dropped = Bundle.open(convert(replace(request, settings=replace(request.settings, resident=2)))).manifest
    assert dropped.quality is not None
    assert dropped.quality.mean_depth == 2


def test_force_never_replaces_what_is_no_bundle_nor_what_it_reads(request_for, tmp_path: Path) -> None:
    precious = tmp_path / "documents"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years of work", encoding="utf-8")
    with pytest.raises(UsageError, match="neither a bundle nor a model"):
        plan(replace(request_for(), output=precious, force=True), SilentReporter())
    request = request_for()
    with pytest.raises(UsageError, match="which --force would remove"):
        plan(replace(request, output=Path(request.source).parent, force=True), SilentReporter())
    path = convert(request)
    assert convert(replace(request, force=True)) == path, "a bundle is replaced"
    with pytest.raises(UsageError, match="which --force would remove"):
        export(Bundle.open(path), "hf", path, reporter=SilentReporter(), force=True)


def test_another_ready_made_checkpoint_never_resumes_silently(
    request_for, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = export(Bundle.open(convert(request_for("a"))), "gptq", tmp_path / "gptq", reporter=SilentReporter())
    request = request_for("taken", group_size=None, river_from=str(first))
    with monkeypatch.context() as patch:
        patch.setattr("adapt_llm.convert.river.place_river", lambda *_: raise_killed())
        with pytest.raises(KilledError):
            convert(request)
    shutil.rmtree(first)
    export(
        Bundle.open(convert(request_for("b", quantizer="gptq"))), "gptq", tmp_path / "gptq", reporter=SilentReporter()
    )
    with pytest.raises(UsageError, match="ready_made was"):
        convert(request)


def raise_killed() -> None:
    raise KilledError


class KilledError(BaseException):
    """Stands for the process going away."""


@contextmanager
def killed_after(monkeypatch: pytest.MonkeyPatch, pieces: int) -> Iterator[None]:
    """Stop before the file number `pieces` is written."""
    count, real = 0, writer.write_piece

    def write(*arguments) -> None:
        nonlocal count
        count += 1
        if count > pieces:
            raise KilledError
        real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(quantise, "write_piece", write)
        yield


@pytest.mark.parametrize("quantizer", ["rtn", "gptq"])
def test_resumed_after_every_piece_it_is_the_same(quantizer: str, request_for, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = bytes_of(convert(request_for("whole", quantizer=quantizer)))
    request = request_for("cut", quantizer=quantizer)
    stops = 0
    while True:
        with killed_after(monkeypatch, 1 if quantizer == "rtn" else 2):
            try:
                cut = convert(request)
                break
            except KilledError:
                stops += 1
                assert not request.output.exists()
    assert stops >= 2
    assert bytes_of(cut) == whole


def test_changed_settings_never_resume_silently(request_for, monkeypatch: pytest.MonkeyPatch) -> None:
    request = request_for()
    with killed_after(monkeypatch, 1), pytest.raises(KilledError):
        convert(request)
    changed = replace(request, settings=replace(request.settings, group_size=-1))
    with pytest.raises(UsageError, match="group_size was 32, is -1"):
        convert(changed)
    assert convert(replace(changed, resume=False)).is_dir()


def test_changed_text_never_resumes_silently(request_for, monkeypatch: pytest.MonkeyPatch) -> None:
    request = request_for()
    with killed_after(monkeypatch, 1), pytest.raises(KilledError):
        convert(request)
    request.settings.calibration.write_text(TEXT + "one word more", encoding="utf-8")
    with pytest.raises(UsageError, match="calibration was"):
        convert(request)


def test_a_dry_plan_writes_nothing(request_for, tmp_path: Path) -> None:
    before = sorted(tmp_path.iterdir())
    made = plan(request_for(), SilentReporter())
    assert sorted(tmp_path.iterdir()) == before
    assert made.to_dict()["exit_layers"] == [2, 3, 4]
    assert made.river_bytes == sum(
        path.stat().st_size - 8 - int.from_bytes(path.read_bytes()[:8], "little")
        for path in convert(request_for()).glob("river-*.safetensors")
    )


@pytest.mark.parametrize(
    ("river", "error", "words"),
    [
        ({"entry_layer": 5}, UsageError, "is not one of 2 to 4"),
        ({"resident": 9}, UsageError, "more than the 4 blocks"),
        ({"group_size": 128}, None, ""),
    ],
)
def test_plans_that_cannot_be_are_refused(river: dict, error, words: str, request_for) -> None:
    if error is None:
        assert plan(request_for(**river), SilentReporter()).river_bytes > 0, "128 steps down to what divides"
        return
    with pytest.raises(error, match=words):
        plan(request_for(**river), SilentReporter())


def test_texts_that_do_not_calibrate_are_refused(request_for) -> None:
    request = request_for()
    text = request.settings.calibration
    text.write_text("too short", encoding="utf-8")
    with pytest.raises(UsageError, match="too short to calibrate"):
        convert(request)
    text.write_bytes("한국어".encode("cp949") * 500)
    with pytest.raises(UsageError, match="not UTF-8"):
        convert(replace(request, resume=False))


def test_a_bundle_is_not_converted_again(request_for) -> None:
    path = convert(request_for())
    with pytest.raises(UnsupportedError, match="river does not go on top of it"):
        plan(replace(request_for("again"), source=str(path)), SilentReporter())


@pytest.mark.parametrize("layout", ["gptq", "gptq_v2"])
def test_ready_made_weights_are_taken_without_loss(layout: str, request_for, tmp_path: Path) -> None:
    own = convert(request_for("own", quantizer="gptq"))
    checkpoint = export(Bundle.open(own), "gptq", tmp_path / "gptq", reporter=SilentReporter())
    if layout == "gptq_v2":
        as_v2(checkpoint)
    request = request_for("taken", group_size=None, river_from=str(checkpoint), calibration=None)
    taken = convert(replace(request, settings=replace(request.settings, tau=0.5)))
    for index in range(1, LAYERS):
        mine, theirs = matrices_of(Bundle.open(own), index), matrices_of(Bundle.open(taken), index)
        for name, matrix in mine.items():
            assert torch.equal(matrix.dequantize(), theirs[name].dequantize()), name
    river = Bundle.open(taken).manifest.method(Settings)
    assert river is not None
    assert (river.quantizer, river.group_size, river.river_source) == ("ready-made", 32, "gptq")


def as_v2(checkpoint: Path) -> None:
    """The same checkpoint in the layout that stores zeros as they are."""
    for path in checkpoint.glob("*.safetensors"):
        tensors = load_file(path)
        save_file({name: t + 0x11111111 if name.endswith("qzeros") else t for name, t in tensors.items()}, path)
    for name in ("config.json", "quantize_config.json"):
        data = json.loads((checkpoint / name).read_text(encoding="utf-8"))
        stated = data.get("quantization_config", data)
        stated |= {"format": "gptq_v2", "checkpoint_format": "gptq_v2"}
        (checkpoint / name).write_text(json.dumps(data), encoding="utf-8")


def test_ready_made_weights_of_another_model_are_refused(request_for, tmp_path: Path) -> None:
    own = convert(request_for("own"))
    checkpoint = export(Bundle.open(own), "gptq", tmp_path / "gptq", reporter=SilentReporter())
    for path in checkpoint.glob("*.safetensors"):
        tensors = load_file(path)
        save_file({name: t for name, t in tensors.items() if "layers.2.mlp" not in name}, path)
    (checkpoint / "model.safetensors.index.json").unlink()
    for path in checkpoint.glob("*.safetensors"):
        path.rename(checkpoint / "model.safetensors")
    request = request_for("taken", group_size=None, river_from=str(checkpoint), calibration=None)
    with pytest.raises(FormatError, match=r"has no model\.layers\.2\.mlp\.gate_proj\.qweight"):
        plan(request, SilentReporter())


def damaged(tiny_llama: Path, folder: Path, change) -> Path:
    """A copy of the model whose tensors `change` has altered."""
    copy = shutil.copytree(tiny_llama, folder)
    tensors = load_file(copy / "model.safetensors")
    change(tensors)
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def poison(name: str):
    def change(tensors: dict) -> None:
        tensors[name] = tensors[name].clone()
        tensors[name][0] = float("nan")

    return change


def cast(name: str, dtype: torch.dtype):
    def change(tensors: dict) -> None:
        tensors[name] = tensors[name].to(dtype)

    return change


Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (cast(Q_PROJ, torch.int8), UnsupportedError, "q_proj.weight is stored as int8"),
        (cast(Q_PROJ, torch.float8_e4m3fn), UnsupportedError, "stored as float8_e4m3fn"),
        (poison(Q_PROJ), FormatError, r"model\.layers\.1\.self_attn\.q_proj\.weight: "),
        (poison("model.embed_tokens.weight"), FormatError, "the embedding has values that are not numbers"),
        (poison("model.layers.0.mlp.up_proj.weight"), FormatError, "no finite likelihood"),
    ],
    ids=["int8", "fp8", "nan", "nan-embedding", "nan-dense"],
)
def test_weights_that_are_no_numbers_are_named(change, error, words: str, request_for, tiny_llama, tmp_path) -> None:
    folder = damaged(tiny_llama, tmp_path / "damaged", change)
    with pytest.raises(error, match=words):
        convert(replace(request_for(), source=str(folder)))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{}", "is damaged"),
        ('{"version": "1.0", "mod', "is damaged"),
        ("version https://git-lfs.github.com", "git-lfs"),
    ],
)
def test_a_damaged_tokenizer_is_found_before_the_work(
    content: str, words: str, request_for, tiny_llama, tmp_path
) -> None:
    folder = shutil.copytree(tiny_llama, tmp_path / "damaged")
    (folder / "tokenizer.json").write_text(content, encoding="utf-8")
    with pytest.raises(FormatError, match=rf"tokenizer.json of damaged.*{words}"):
        plan(replace(request_for(), source=str(folder)), SilentReporter())


def test_the_output_needs_a_name(request_for) -> None:
    for path in ("/", "", "."):
        with pytest.raises(UsageError, match="no folder of its own"):
            replace(request_for(), output=Path(path))
