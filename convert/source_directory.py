"""A Hugging Face checkpoint in a local directory: config.json, safetensors, a tokenizer.

Knows the files' names and what may not be read (pickles, remote code, quantised weights). Knows no Hub.
"""

import hashlib
import importlib
import tempfile
from pathlib import Path
from typing import Any

from ..errors import FormatError, UnsupportedError
from ..runtime.architecture import Architecture, architecture_of
from ..runtime.json_text import parse_json
from ..runtime.store import TensorStore, open_safetensors, text_backbone, weight_map
from .source_identity import SourceIdentity, fingerprint, index_sha256

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
TEXT_NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "README.md",  # the model card: it states the licence
)
# What a tokenizer.json can be made from.
SLOW_TOKENIZERS = ("tokenizer.model", "vocab.json", "spiece.model")
_LICENCES = ("license", "licence", "notice", "copying", "use_policy")
# Keys that a config with several towers states outside of text_config.
_SHARED = ("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings", "dtype", "torch_dtype")
_DECODERS = {
    "gemma3_text": "Gemma3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
}
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def is_licence(name: str) -> bool:
    """Whether a file of this name says what may be done with the model."""
    return name.lower().startswith(_LICENCES)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises `FormatError` for anything else, saying so when it is a git-lfs pointer."""
    try:
        value = parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        if path.read_bytes().startswith(b"version https://git-lfs"):
            hint = "Run `git lfs pull` in its folder."
            raise FormatError(f"{path.name} is a git-lfs pointer, not the file itself", hint) from error
        raise FormatError(f"{path.name} is not JSON", "Download it again.") from error
    if not isinstance(value, dict):
        raise FormatError(f"{path.name} is not a JSON object", "Download it again.")
    return value


def check_config(config: dict[str, Any], name: str) -> None:
    """Refuse what cannot be converted before any weight is looked at (or downloaded).

    Code named by `auto_map` is never run: it is ignored where the model type is known, and refused where it is not.
    """
    if config.get("quantization_config"):
        method = (config["quantization_config"] or {}).get("quant_method", "an unknown method")
        raise UnsupportedError(
            f"{name} is already quantised ({method})",
            "Convert the 16-bit model it was made from; ready-made GPTQ weights go with --river-from.",
        )
    try:
        Architecture.from_config(config)
    except UnsupportedError as error:
        if "auto_map" not in config:
            raise
        hint = "Its config names code of its own, which is never run; a supported architecture is needed."
        raise UnsupportedError(error.message, hint) from error


def decoder_config(config: dict[str, Any]) -> dict[str, Any]:
    """The config of the decoder alone, where it has other towers beside it (Gemma 3, Mistral 3); else `config`.

    It goes with the names of `text_backbone`, so that the two make a plain checkpoint.
    """
    text = config.get("text_config")
    if not isinstance(text, dict):
        return config
    family = Architecture.from_config(config).family
    shared = {key: config[key] for key in _SHARED if key in config}
    return {**shared, **text, "model_type": family, "architectures": [_DECODERS.get(family, "AutoModelForCausalLM")]}


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The safetensors files that hold the model, by the rules of `open_safetensors`; missing ones are left out."""
    index, single = folder / INDEX, folder / SINGLE
    if index.is_file():
        shards = sorted(set(weight_map(read_json(index), index.name).values()))
        return tuple(folder / shard for shard in shards if (folder / shard).is_file())
    return (single,) if single.is_file() else tuple(sorted(folder.glob("model-*-of-*.safetensors")))


class DirectorySource:
    """A checkpoint in `folder`. Opening it reads headers only."""

    def __init__(self, folder: Path, *, name: str, revision: str | None = None) -> None:
        config_path = folder / "config.json"
        stated = read_json(config_path)
        check_config(stated, name)
        self.config = decoder_config(stated)
        self.store: TensorStore = text_backbone(_open_weights(folder))
        self.weight_files = weight_files(folder)
        generation = folder / "generation_config.json"
        self.generation_config = read_json(generation) if generation.is_file() else None
        self.identity = SourceIdentity(
            id=name,
            revision=revision,
            config_sha256=hashlib.sha256(config_path.read_bytes()).hexdigest(),
            index_sha256=index_sha256(self.store, self.weight_files),
        )
        self._folder = folder

    @property
    def architecture(self) -> Architecture:
        """See `Source.architecture`."""
        return architecture_of(self.config, self.store)

    def text_files(self) -> dict[str, bytes | Path]:
        """See `Source.text_files`.

        Raises `FormatError` when there is no tokenizer, `UnsupportedError` when there is one that only transformers can
        turn into a tokenizer.json and that is not installed.
        """
        files = self._given_text_files()
        if "tokenizer.json" not in files:
            files["tokenizer.json"] = _converted_tokenizer(self._folder)
        return files

    def fingerprint(self) -> str:
        """See `Source.fingerprint`."""
        slow = {name: self._folder / name for name in SLOW_TOKENIZERS if (self._folder / name).is_file()}
        return fingerprint(self.identity, self.weight_files, self._given_text_files() | slow)

    def _given_text_files(self) -> dict[str, bytes | Path]:
        return given_text_files(self._folder)


def given_text_files(folder: Path) -> dict[str, bytes | Path]:
    """The text files of a checkpoint that are there: name -> path."""
    licences = sorted(path.name for path in folder.iterdir() if path.is_file() and is_licence(path.name))
    return {name: folder / name for name in (*TEXT_NAMES, *licences) if (folder / name).is_file()}


def open_directory(folder: Path) -> DirectorySource:
    """Open a local checkpoint or the backbone of a bundle.

    Raises `FormatError` (not a checkpoint, damaged) or `UnsupportedError` (pickles only, quantised, an adapter, an
    architecture that is not known).
    """
    if not (folder / "config.json").is_file():
        if (folder / "adapter_config.json").is_file():
            hint = "Merge it into its base model first (`merge_and_unload` in peft)."
            raise UnsupportedError(f"{folder.name} is a PEFT adapter, not a model", hint)
        raise FormatError(
            f"{folder} has no config.json", "Give the folder of a Hugging Face checkpoint, or a .gguf file."
        )
    return DirectorySource(folder, name=folder.resolve().name)


def refuse_pickles(name: str) -> UnsupportedError:
    """The error for a model whose weights are pickles only."""
    return UnsupportedError(
        f"{name} has its weights as pickles only, which can run code when they are read",
        "Save it with `safe_serialization=True` in transformers, or take a revision with safetensors files.",
    )


def _open_weights(folder: Path) -> TensorStore:
    has_weights = weight_files(folder) or (folder / INDEX).is_file()
    if not has_weights and any(next(folder.glob(pattern), None) for pattern in _PICKLES):
        raise refuse_pickles(folder.name)
    return open_safetensors(folder)


def _converted_tokenizer(folder: Path) -> bytes:
    """tokenizer.json made from older files, by transformers, without code of the model's own."""
    if not any((folder / name).is_file() for name in SLOW_TOKENIZERS):
        raise FormatError(f"{folder.name} has no tokenizer.json", "Download the tokenizer's files as well.")
    try:
        # An extra: most models have a tokenizer.json, and the import takes seconds.
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        hint = "Install what converts it: pip install 'adapt-llm[slow-tokenizers]'."
        raise UnsupportedError(f"{folder.name} has no tokenizer.json", hint) from error
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        with tempfile.TemporaryDirectory() as made:
            tokenizer.save_pretrained(made)
            return (Path(made) / "tokenizer.json").read_bytes()
    except (ImportError, ValueError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        hint = "Provide a tokenizer.json; the extra adapt-llm[slow-tokenizers] converts the usual kinds."
        raise UnsupportedError(f"the tokenizer of {folder.name} cannot be converted: {reason}", hint) from error
