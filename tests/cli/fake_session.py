"""A session without a model, at the seam `adapt_llm.cli.services`. As a script it is the program with that session.

What a prompt says decides what happens: the answer is the prompt's words, and a word FAIL refuses it, SLOW takes
its time, DEFECT breaks the program, NONE ends before the first token.
"""

import json
import sys
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from adapt_llm.cli import services
from adapt_llm.cli.generation import Choices
from adapt_llm.errors import AdaptError, ResourceError, UsageError
from adapt_llm.runtime.stream import GenerationStats, TokenRecord, TokenStream


def stream(text: str, options: Any) -> TokenStream:
    if "FAIL" in text:
        raise AdaptError("The prompt does not fit", "Shorten it.")
    if "FULL" in text:
        raise ResourceError("not enough memory")
    if "DEFECT" in text:
        raise ZeroDivisionError("a defect")
    words = [] if "NONE" in text else [f"{word} " for word in text.split()]
    limit = options.choices.max_tokens or 1000
    stats = GenerationStats(prompt_tokens=len(text))
    return TokenStream(_records(words, limit, stats, slow="SLOW" in text), stats)


def _records(words: list[str], limit: int, stats: GenerationStats, *, slow: bool) -> Generator[TokenRecord, None, None]:
    for index, word in enumerate([*words, ""][:limit]):
        reason = "stop" if index == len(words) else "length" if index + 1 == limit else None
        if slow and index:
            time.sleep(0.25)
        record = TokenRecord(index, index, word, 2 + index % 3, 0.5, reason)
        stats.add(record)
        yield record


@dataclass
class FakeConversation:
    system: str | None
    messages: list[dict[str, str]] = field(default_factory=list)
    dropped: int = 0

    @property
    def turns(self) -> int:
        return len(self.messages) // 2

    def say(self, text: str, options: Any) -> TokenStream:
        answer = stream(f"{self.system or ''} [{self.turns + 1}] {text}", options)
        self.messages.append({"role": "user", "content": text})
        if self.turns >= 3:
            self.dropped = self.turns - 2
        return TokenStream(self._kept(answer), answer.stats)

    def regenerate(self, options: Any) -> TokenStream:
        if not self.messages:
            raise UsageError("There is no answer to make again", "Say something first.")
        text = self.messages[-2]["content"]
        del self.messages[-2:]
        return self.say(text, options)

    def _kept(self, answer: TokenStream) -> Generator[TokenRecord, None, None]:
        pieces: list[str] = []
        try:
            for record in answer:
                pieces.append(record.text)
                yield record
        finally:
            self.messages.append({"role": "assistant", "content": "".join(pieces)})

    def clear(self) -> None:
        self.messages.clear()

    def save(self, path: Path) -> None:
        path.write_text(json.dumps({"system": self.system, "messages": self.messages}), encoding="utf-8")

    def load(self, path: Path) -> None:
        if not path.exists():
            raise UsageError(f"There is no file {path}")
        data = json.loads(path.read_text(encoding="utf-8"))
        self.system, self.messages = data["system"], data["messages"]


@dataclass
class FakeSession:
    path: Path
    settings: Mapping[str, Any]
    calls: list[tuple[object, Any]] = field(default_factory=list)

    def complete(
        self,
        prompt: str | Sequence[Mapping[str, str]],
        options: Any,
        *,
        system: str | None,
        raw: bool,
    ) -> TokenStream:
        self.calls.append((prompt, options))
        text = prompt if isinstance(prompt, str) else " / ".join(message["content"] for message in prompt)
        return stream(" ".join([*([system] if system else []), *(["RAW"] if raw else []), text]), options)

    def prepare(self, *args: Any, **options: Any) -> TokenStream:
        """A stream that has not begun is what this session calls a request."""
        return self.complete(*args, **options)

    def rows_at_once(self, asked: int | None) -> int:
        return 1 if asked is None else asked

    def answer_all(self, requests: Iterable[TokenStream | None], batch_size: int) -> Iterator[SimpleNamespace]:
        """Reads `batch_size` requests, then answers them; fewer where none is there yet."""
        waiting: list[TokenStream] = []
        for request in requests:
            waiting += [] if request is None else [request]
            if request is None or len(waiting) == batch_size:
                yield from map(_answer, waiting)
                waiting.clear()
        yield from map(_answer, waiting)

    def chat(self, system: str | None, *, raw: bool) -> FakeConversation:
        if "base" in str(self.path) and not raw and self.settings["chat_template"] is None:
            raise AdaptError(
                "base has no chat template: it is a base model", "Give one with --chat-template, or --raw."
            )
        return FakeConversation(system)


def _answer(request: TokenStream) -> SimpleNamespace:
    return SimpleNamespace(text="".join(record.text for record in request), stats=request.stats)


def open_session(path: Path, settings: Mapping[str, Any], reporter: object) -> FakeSession:
    if "gone" in str(path):
        raise UsageError(f"there is no bundle at {path}")
    return FakeSession(path, settings)


def generation_options(choices: Choices, *, row: int = 0) -> SimpleNamespace:
    return SimpleNamespace(choices=choices, row=row)


PATCHES = {"open_session": open_session, "generation_options": generation_options, "peak_memory": lambda: 3 << 30}
PATCHES["twodee"] = lambda path: None

if __name__ == "__main__":
    for name, fake in PATCHES.items():
        setattr(services, name, fake)
    from adapt_llm.cli.app import main

    main()
    sys.exit(0)
