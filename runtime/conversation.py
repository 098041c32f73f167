"""A conversation: its messages, what of them fits in the context, and the answer as a token stream.

Each turn renders the whole conversation, so the model always reads exactly what its template writes; the KV cache
makes that cheap, since only what differs from the turn before is computed. Knows no terminal and no bundle.
"""

import json
import os
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import AdaptError, FormatError, UsageError
from .continuation import Request, check_fits
from .generate import Model, PromptCache, stream
from .options import GenerationOptions
from .stops import Stops
from .stream import TokenRecord, TokenStream
from .template import Message, Template
from .text import Tokenizer, read_json

_FORMAT = "adapt-conversation"
_ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class ChatParts:
    """What a conversation works with. `template` None = plain completion, for base models."""

    model: Model
    tokenizer: Tokenizer
    template: Template | None
    context_size: int

    def encode(self, messages: Sequence[Message], options: GenerationOptions) -> list[int]:
        """Ids of a conversation up to where the assistant speaks; in plain completion, of all texts joined."""
        if self.template is None:
            return self.tokenizer.encode("".join(message["content"] for message in messages))
        text = self.template.render(messages, **dict(options.template_variables))
        return self.tokenizer.encode(text, add_special_tokens=False)

    def generate(
        self,
        ids: Sequence[int],
        options: GenerationOptions,
        cache: PromptCache,
        cancelled: Callable[[], bool] | None = None,
    ) -> TokenStream:
        """Continue `ids`; see `generate.stream`."""
        return stream(
            self.model, self.request(ids, options), tokenizer=self.tokenizer, cache=cache, cancelled=cancelled
        )

    def request(self, ids: Sequence[int], options: GenerationOptions) -> Request:
        """What it means to continue `ids`. Raises UsageError for stops that the model does not have."""
        strings = options.stop + (() if self.template is None or options.ignore_eos else self.template.stops)
        return Request(
            ids,
            options.sampling,
            Stops.of(self.tokenizer, strings, options.stop_ids, ignore_eos=options.ignore_eos),
            self.context_size,
            options.max_tokens,
            options.row,
            continues=self.template is None,
        )


class Conversation:
    """Turns of user and assistant, with an optional system text.

    Attributes:
        messages: the whole conversation, oldest first, without the system text.
        dropped: how many of the oldest turns (a user's message and its answer) the last prompt left out.

    """

    def __init__(self, parts: ChatParts, system: str | None = None) -> None:
        self._parts = parts
        self.system = system
        self.messages: list[dict[str, str]] = []
        self.dropped = 0
        self._attempt = 0
        self._cache = PromptCache(parts.model, parts.context_size, whole=True)

    @property
    def turns(self) -> int:
        """Answered turns."""
        return sum(message["role"] == "assistant" for message in self.messages)

    def say(self, text: str, options: GenerationOptions, cancelled: Callable[[], bool] | None = None) -> TokenStream:
        """Speak as the user. The answer joins the conversation as the stream is read, however it ends.

        An answer that is cut short (cancelled, closed, interrupted) is kept as far as it came, and its turn is
        closed by the template in the next prompt. If it has not begun, the turn is withdrawn.

        Raises:
            AdaptError: even this turn alone does not fit in the context; the conversation is as before.

        """
        before = self._answered()
        self.messages = [*before, {"role": "user", "content": text}]
        self._attempt = 0
        return self._answer(options, cancelled, before)

    def regenerate(self, options: GenerationOptions, cancelled: Callable[[], bool] | None = None) -> TokenStream:
        """Answer the last message of the user again, with other randomness. The new answer replaces the old one.

        Raises:
            UsageError: nothing was said yet.

        """
        before = self._answered()
        if not before:
            raise UsageError("There is no answer to make again", "Say something first.")
        self.messages = before[:-1]
        self._attempt += 1
        return self._answer(options, cancelled, before)

    def undo(self) -> bool:
        """Forget the last turn; False if there is none."""
        answered = self._answered()
        self.messages = answered[:-2]
        self.dropped = min(self.dropped, self.turns)
        return bool(answered)

    def clear(self) -> None:
        """Forget all turns; the system text stays."""
        self.messages = []
        self.dropped = 0

    def save(self, path: Path) -> None:
        """Write the conversation as JSON; the file is whole or as before.

        Raises UsageError for a file that is there and is no saved conversation.
        """
        if path.exists():
            try:
                _parse(read_json(path), path)
            except AdaptError as error:
                raise UsageError(
                    f"{path} is there, and is no saved conversation", "Save under another name."
                ) from error
        data = {"format": _FORMAT, "version": 1, "system": self.system, "messages": self._answered()}
        beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            beside.write_text(json.dumps(data, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
            beside.replace(path)
        except OSError as error:
            beside.unlink(missing_ok=True)
            raise AdaptError(f"{path} cannot be written: {error.strerror}") from error

    def load(self, path: Path) -> None:
        """Replace system text and turns by those of a saved conversation.

        Raises:
            UsageError: no such file.
            FormatError: not a saved conversation; this one is as before.

        """
        if not path.is_file():
            raise UsageError(f"There is no file {path}", "Save a conversation with /save first.")
        self.system, self.messages = _parse(read_json(path), path)
        self.dropped = 0

    def _answered(self) -> list[dict[str, str]]:
        """All complete turns: a message whose stream was never read has no answer and does not count."""
        return self.messages[: 2 * self.turns]

    def _answer(
        self, options: GenerationOptions, cancelled: Callable[[], bool] | None, before: list[dict[str, str]]
    ) -> TokenStream:
        """Answer the last message; where no answer comes about, the conversation is as `before`."""
        options = replace(options, row=self.turns + (self._attempt << 32))
        dropped = self.dropped
        try:
            stream = self._parts.generate(self._fit(options), options, self._cache, cancelled)
        except AdaptError:
            self.messages, self.dropped = before, dropped
            raise
        return TokenStream(self._kept(stream, before), stream.stats)

    def _kept(self, stream: TokenStream, before: list[dict[str, str]]) -> Generator[TokenRecord, None, None]:
        """Pass the records on; whatever ends them, keep the text so far as the answer."""
        asked = self.messages
        pieces: list[str] = []
        try:
            for record in stream:
                pieces.append(record.text)
                yield record
        finally:
            stream.close()
            answer = "".join(pieces)
            if self.messages is asked:  # else the conversation went on without reading this stream to its end
                begun = answer or stream.stats.finish_reason is not None
                self.messages = [*asked, {"role": "assistant", "content": answer}] if begun else before

    def _fit(self, options: GenerationOptions) -> list[int]:
        """Encode as much of the conversation as fits, leaving out the oldest turns; sets `dropped`.

        A quarter of the context is kept for the answer, or what `max_tokens` needs. When turns must go, they go
        until another quarter is free, so that not every following turn has to compute its prompt anew.
        """
        size = self._parts.context_size
        room = max(1, min(options.max_tokens or size, size // 4))
        starts = [at for at, message in enumerate(self.messages) if message["role"] == "user"]
        self.dropped = min(self.dropped, len(starts) - 1)
        ids = self._encode(starts[self.dropped], options)
        if len(ids) + room <= size:
            return ids
        while len(ids) + room > size - size // 4 and self.dropped < len(starts) - 1:
            self.dropped += 1
            ids = self._encode(starts[self.dropped], options)
        check_fits(len(ids), size)
        return ids

    def _encode(self, start: int, options: GenerationOptions) -> list[int]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return self._parts.encode(system + self.messages[start:], options)


def _parse(data: dict[str, Any], path: Path) -> tuple[str | None, list[dict[str, str]]]:
    """Check a saved conversation: user and assistant in turn, and complete."""
    messages, system = data.get("messages"), data.get("system")
    if data.get("format") != _FORMAT or data.get("version") != 1 or not isinstance(messages, list):
        raise FormatError(f"{path} is not a conversation that this version saved")
    if not isinstance(system, str | None):
        raise FormatError(f"{path}: the system text is not text")
    for at, message in enumerate(messages):
        role = _ROLES[1 + at % 2]
        if not (isinstance(message, dict) and message.get("role") == role and isinstance(message.get("content"), str)):
            raise FormatError(f"{path}: message {at + 1} is not a text of the {role}")
    if len(messages) % 2:
        raise FormatError(f"{path}: the last message has no answer")
    return system, [{"role": message["role"], "content": message["content"]} for message in messages]
