"""An opened bundle, ready to answer: model, tokenizer, template and limits in one place.

The only module that knows them all; it computes nothing itself. Knows no terminal.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch

from ..errors import UsageError, attempt
from .batch import Answer, BatchModel, Outcome, answer_all, suitable_batch
from .bundle import Bundle
from .continuation import Request, check_fits
from .conversation import ChatParts, Conversation
from .generate import Model, PromptCache, stream
from .options import GenerationOptions, SessionOptions
from .progress import Reporter, SilentReporter
from .stream import TokenStream
from .template import Message, Template, has_template
from .text import Tokenizer

CONTEXT = 4096
"""Tokens that a conversation may hold unless `ctx_size` says otherwise."""

_ROOM = 1024


class Session:
    """Completes prompts and holds conversations with one model.

    Args:
        folder: where the template lies.
        tokenizer: the folder's.
        model: what to run.
        max_positions: tokens that the model's positions reach.
        options: as the bundle was opened.

    Raises:
        UsageError: `ctx_size` beyond what the model's positions reach.

    """

    def __init__(
        self, folder: Path, tokenizer: Tokenizer, model: Model, max_positions: int, options: SessionOptions
    ) -> None:
        if options.ctx_size is not None and options.ctx_size > max_positions:
            raise UsageError(
                f"--ctx-size is {options.ctx_size}; the model's positions reach {max_positions}",
                f"Give --ctx-size {max_positions} or less.",
            )
        self.folder = folder
        self.tokenizer = tokenizer
        self.model = model
        self.max_positions = max_positions
        self.options = options

    @cached_property
    def template(self) -> Template:
        """The chat template asked for, or the model's own.

        Raises:
            AdaptError: a base model without one.
            UsageError: there is none of that name.
            FormatError: it is damaged.

        """
        return Template.from_folder(
            self.folder,
            self.options.chat_template,
            special_tokens=self.tokenizer.special_tokens,
            adds_bos=self.tokenizer.adds_bos,
        )

    @property
    def converses(self) -> bool:
        """Whether there is a chat template; without, a prompt is text to continue."""
        return self.options.chat_template is not None or has_template(self.folder)

    def complete(
        self,
        prompt: str | Sequence[Message],
        options: GenerationOptions,
        *,
        system: str | None = None,
        raw: bool = False,
        cancelled: Callable[[], bool] | None = None,
    ) -> TokenStream:
        """Answer one prompt, independently of all others.

        Args:
            prompt: what the user says, or a whole conversation. With `raw`, or for a model without a chat template,
                text to continue.
            options: how to answer.
            system: put before the prompt as the system message.
            raw: use no template.
            cancelled: see `generate`.

        Raises:
            UsageError: an empty prompt; messages or a system text where no template is used.
            AdaptError: the prompt does not fit, or the template refuses it.

        """
        request = self.prepare(prompt, options, system=system, raw=raw)
        return self._stream(request, cancelled)

    def prepare(
        self,
        prompt: str | Sequence[Message],
        options: GenerationOptions,
        *,
        system: str | None = None,
        raw: bool = False,
    ) -> Request:
        """Say what is to be continued, for `answer_all`; see `complete`.

        Raises:
            UsageError, AdaptError: as `complete` does.

        """
        if isinstance(prompt, str) and (raw or not self.converses):
            if system is not None:
                raise UsageError("A system text needs a chat template", "Put it into the prompt, or drop --raw.")
            messages, template = [{"role": "user", "content": prompt}], None
        else:
            if raw:
                raise UsageError("Messages need a chat template", "Give a plain prompt, or drop --raw.")
            messages, template = _as_messages(prompt, system), self.template
        parts = self._parts(template, self.max_positions)
        ids = parts.encode(messages, options)
        context_size = self._context(len(ids), options.max_tokens)
        check_fits(len(ids), context_size, self.max_positions)
        return replace(parts.request(ids, options), context_size=context_size)

    def rows_at_once(self, asked: int | None = None) -> int:
        """How many texts `answer_all` is to continue at once: as many as asked for, or as suits model and memory.

        Raises:
            UsageError: more than one is asked for, and the model cannot.

        """
        if isinstance(self.model, BatchModel):
            return suitable_batch(self.model, self.options.ctx_size or CONTEXT) if asked is None else asked
        if asked is not None and asked > 1:
            raise UsageError("This bundle, opened so, continues one text at a time", "Leave --batch-size out.")
        return 1

    def answer_all(self, requests: Iterable[Request | None], batch_size: int) -> Iterator[Outcome]:
        """Continue many texts, `batch_size` at once; yield their outcomes in order. See `batch.answer_all`."""
        if batch_size > 1 and isinstance(self.model, BatchModel):
            return answer_all(self.model, requests, tokenizer=self.tokenizer, batch_size=batch_size)
        return (attempt(self._answer, request) for request in requests if request is not None)

    def _answer(self, request: Request) -> Answer:
        stream = self._stream(request)
        return Answer("".join(record.text for record in stream), stream.stats)

    def _stream(self, request: Request, cancelled: Callable[[], bool] | None = None) -> TokenStream:
        cache = PromptCache(self.model, request.context_size)
        return stream(self.model, request, tokenizer=self.tokenizer, cache=cache, cancelled=cancelled)

    def chat(self, system: str | None = None, *, raw: bool = False) -> Conversation:
        """Begin a conversation; with `raw`, plain completion of a growing text.

        Raises:
            AdaptError: a base model without a chat template, and not `raw`.

        """
        context_size = self.options.ctx_size or min(CONTEXT, self.max_positions)
        return Conversation(self._parts(None if raw else self.template, context_size), system)

    def _parts(self, template: Template | None, context_size: int) -> ChatParts:
        return ChatParts(self.model, self.tokenizer, template, context_size)

    def _context(self, prompt: int, max_tokens: int | None) -> int:
        """Tokens that a single prompt and its answer may have: as long as asked for, where the model can."""
        wanted = prompt + (_ROOM if max_tokens is None else max_tokens)
        return self.options.ctx_size or min(self.max_positions, max(CONTEXT, wanted))


def open_session(path: Path, options: SessionOptions, *, reporter: Reporter | None = None) -> Session:
    """Open a bundle and load its model.

    Raises:
        AdaptError: see `Bundle.open`, `Tokenizer.load` and `load_session`.

    """
    bundle = Bundle.open(path, cache_dir=options.cache_dir, reporter=reporter)
    return load_session(bundle, Tokenizer.load(path), options, reporter=reporter)


def load_session(
    bundle: Bundle, tokenizer: Tokenizer, options: SessionOptions, *, reporter: Reporter | None = None
) -> Session:
    """Load the model of an opened bundle, whose tokenizer is there.

    Raises:
        AdaptError: see `load_model` and `Session`.

    """
    from .models import load_model  # noqa: PLC0415 - tests and other models do without it

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    model = load_model(bundle, options, reporter or SilentReporter())
    tokenizer.vocab_size = bundle.architecture.vocab_size  # some families' configs leave it out
    return Session(bundle.path, tokenizer, model, bundle.architecture.max_positions, options)


def _as_messages(prompt: str | Sequence[Message], system: str | None) -> list[Message]:
    messages: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if system is None:
        return messages
    if messages and messages[0].get("role") == "system":
        raise UsageError("There are two system texts", "Give it in the messages or with --system, not both.")
    return [{"role": "system", "content": system}, *messages]
