"""A small server that answers as the Hugging Face Hub does, on the loopback. Loaded by test_source_hub.py."""

import hashlib
import json
from http.server import BaseHTTPRequestHandler

import torch
from safetensors.torch import save

from adapt_llm.runtime.architecture import Architecture

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CONFIG = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


def sharded() -> dict[str, bytes]:
    """A repository of two shards, with what must not be fetched beside them."""
    shapes = Architecture.from_config(CONFIG).tensors()
    names = sorted(shapes)
    tensors = {name: torch.randn(shapes[name]).bfloat16() for name in names}
    halves = (names[: len(names) // 2], names[len(names) // 2 :])
    shards = {f"model-0000{i}-of-00002.safetensors": half for i, half in enumerate(halves, start=1)}
    index = {"metadata": {}, "weight_map": {name: shard for shard, half in shards.items() for name in half}}
    return {
        "config.json": json.dumps(CONFIG).encode(),
        "model.safetensors.index.json": json.dumps(index).encode(),
        **{shard: save({name: tensors[name] for name in half}) for shard, half in shards.items()},
        "tokenizer.json": b"{}",
        "LICENSE": b"Apache",
        "generation_config.json": b'{"eos_token_id": 2}',
        "pytorch_model.bin": b"a pickle",
        "original/consolidated.00.pth": b"another",
        "modeling_tiny.py": b"raise SystemExit",
    }


class Hub:
    """What the server has, what it was asked for, and how it misbehaves."""

    def __init__(self) -> None:
        self.repositories = {"org/tiny": sharded(), "gpt2": sharded()}
        self.asked: list[tuple[str, str]] = []
        self.refuse: dict[str, tuple[int, dict[str, str]]] = {}
        self.cut_after: dict[str, int] = {}
        self.tokens: set[str] = set()

    def served(self) -> list[str]:
        return [path.rsplit("/", 1)[1] for method, path in self.asked if method == "GET" and "/resolve/" in path]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, hub: Hub, *arguments: object) -> None:
        self.hub = hub
        super().__init__(*arguments)

    def log_message(self, *_arguments: object) -> None:
        pass

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), "X-Repo-Commit": COMMIT, **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        self.hub.asked.append((self.command, path))
        self.hub.tokens.add(self.headers.get("Authorization", ""))
        name = path.removeprefix("/api/models/").lstrip("/").split("/resolve/")[0].split("/revision/")[0]
        if name in self.hub.refuse:
            status, headers = self.hub.refuse[name]
            return self.answer(status, **headers)
        files = self.hub.repositories.get(name)
        if files is None:
            return self.answer(401, X_Error_Message="Invalid username or password.")
        revision = path.split("/resolve/")[-1].split("/revision/")[-1].split("/")[0]
        if revision not in ("main", COMMIT):
            return self.answer(404, X_Error_Code="RevisionNotFound", X_Error_Message=f"Invalid rev id: {revision}")
        return self.info(name, files) if path.startswith("/api/") else self.file(path, files)

    def info(self, name: str, files: dict[str, bytes]) -> None:
        siblings = [{"rfilename": file, "size": len(content)} for file, content in files.items()]
        self.answer(200, json.dumps({"id": name, "sha": COMMIT, "siblings": siblings}).encode())

    def file(self, path: str, files: dict[str, bytes]) -> None:
        name = path.split("/resolve/")[1].split("/", 1)[1]
        if name not in files:
            return self.answer(404, X_Error_Code="EntryNotFound")
        content, etag = files[name], f'"{hashlib.sha256(files[name]).hexdigest()}"'
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")[0])
        if name in self.hub.cut_after and self.command == "GET":
            return self.cut(content, etag, self.hub.cut_after.pop(name))
        if start:
            span = f"bytes {start}-{len(content) - 1}/{len(content)}"
            return self.answer(206, content[start:], ETag=etag, Content_Range=span)
        return self.answer(200, content, ETag=etag)

    def cut(self, content: bytes, etag: str, keep: int) -> None:
        """Promise everything, send a part, hang up."""
        self.send_response(200)
        for name, value in {"Content-Length": str(len(content)), "X-Repo-Commit": COMMIT, "ETag": etag}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content[:keep])
        self.wfile.flush()
        self.close_connection = True
