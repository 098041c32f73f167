"""A bundle as a model of lm-evaluation-harness (extra `eval`): the entry point `adapt` of `lm_eval.models`.

Thin: log-likelihoods come from `scoring`, texts from `generate`. Knows no tasks and no metrics. The only module that
imports the harness when it is imported; `adapt eval --tasks` goes through `task_quality`.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window  # pyright: ignore[reportMissingImports]

from ..errors import AdaptError, UsageError
from .continuation import Request as Text
from .options import GenerationOptions, Sampling, SessionOptions
from .progress import Reporter, SilentReporter
from .scoring import Passage, Scorer, full_depth, reader_of
from .session import Session, open_session
from .stops import Stops

NEW_TOKENS = 256
"""New tokens at most where a task does not say; the harness's own default."""
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_SAMPLING = ("do_sample", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class Request(Protocol):
    """What the harness hands over (`lm_eval.api.instance.Instance`)."""

    @property
    def args(self) -> tuple[Any, ...]:
        """(context, continuation), (text,), or (context, settings of generation)."""
        ...


class AdaptLM(TemplateLM):
    """`bundle` is a folder; the other arguments are those of `SessionOptions`, and may be text (`--model_args`).

    `at_full_depth`: measure the backbone with every token through all blocks, instead of the bundle's exit rule.
    `batch_size`: sequences scored at once, "auto" for as many as a pass of some thousand tokens holds.
    """

    def __init__(
        self,
        bundle: str | Path,
        *,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,  # noqa: ARG002 - the harness gives it to every model
        at_full_depth: bool = False,
        **options: Any,  # noqa: ANN401 - the fields of SessionOptions
    ) -> None:
        wanted = {name: value for name, value in options.items() if value is not None}
        self._begin(open_session(Path(bundle), SessionOptions(**wanted)), batch_size, at_full_depth=at_full_depth)

    @classmethod
    def of(
        cls,
        session: Session,
        *,
        batch_size: int | None = None,
        at_full_depth: bool = False,
        seed: int = 0,
        reporter: Reporter | None = None,
    ) -> "AdaptLM":
        """Wrap a bundle that is open."""
        self = cls.__new__(cls)
        self._begin(session, batch_size, at_full_depth=at_full_depth, seed=seed, reporter=reporter)
        return self

    def _begin(
        self,
        session: Session,
        batch_size: int | str | None,
        *,
        at_full_depth: bool,
        seed: int = 0,
        reporter: Reporter | None = None,
    ) -> None:
        super().__init__()
        model = full_depth(session.model) if at_full_depth else session.model
        self._session = Session(session.folder, session.tokenizer, model, session.max_positions, session.options)
        self._seed, self._reporter = seed, reporter or SilentReporter()
        self._tokens = session.tokenizer
        self._at_once = None if batch_size in (None, "auto") else int(batch_size)
        self.scorer = Scorer(reader_of(model), batch_size=self._at_once)
        self.max_length = session.options.ctx_size or session.max_positions
        self.batch_size = batch_size or "auto"

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        named = self._tokens.eos_token
        found = None if named is None else self._tokens.backend.token_to_id(named)
        return min(self._tokens.stop_ids, default=0) if found is None else found

    @property
    def prefix_token_id(self) -> int:
        """What the first token of a text is predicted from: BOS, or else the end of another text."""
        return self.eot_token_id if self._tokens.bos_id is None else self._tokens.bos_id

    @property
    def tokenizer_name(self) -> str:
        """Names the tokenizer in the harness's cache of requests."""
        return str(self._session.folder)

    def chat_template(self, chat_template: bool | str = False) -> str:  # noqa: ARG002 - there is one
        """Return the template's text, which the harness keeps with its results."""
        return self._session.template.source

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Render a conversation; without `add_generation_prompt`, up to where its last message goes on."""
        if add_generation_prompt:
            return self._session.template.render(chat_history)
        *before, last = chat_history
        return self._session.template.render(before) + last["content"]

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: object) -> list[int]:
        """Tokenise; by default as the bundle does, with one BOS where its texts begin so."""
        return self._tokens.encode(string, add_special_tokens=add_special_tokens is not False)

    def loglikelihood(self, requests: Sequence[Request], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """See TemplateLM; progress goes through the reporter."""
        return super().loglikelihood(cast("list[Any]", requests), disable_tqdm=disable_tqdm)

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[object, Sequence[int], Sequence[int]]],
        **_: object,
    ) -> list[tuple[float, bool]]:
        """Score continuations; a beginning that the model cannot hold is cut off."""
        passages = [self._passage(context, continuation) for _, context, continuation in requests]
        with self._reporter.task("Score", len(passages)) as task:
            return [(score.log_prob, score.greedy) for score in self.scorer.score(passages, task.advance)]

    def _passage(self, context: Sequence[int], continuation: Sequence[int]) -> Passage:
        if len(continuation) > self.max_length:
            what = f"A continuation has {len(continuation)} tokens, the context holds {self.max_length}"
            raise UsageError(what, "Raise --ctx-size, or choose other tasks.")
        ids = (*context, *continuation)[-(self.max_length + 1) :]
        return Passage(ids, len(ids) - len(continuation))

    def loglikelihood_rolling(self, requests: Sequence[Request], disable_tqdm: bool = True) -> list[float]:
        """Log-likelihoods of whole texts, cut where the context ends."""
        owners: list[int] = []
        windows: list[tuple[None, Sequence[int], Sequence[int]]] = []
        for number, request in enumerate(requests):
            for context, continuation in self._windows(request.args[0]):
                owners.append(number)
                windows.append((None, context, continuation))
        totals = [0.0] * len(requests)
        scores = self._loglikelihood_tokens(windows, disable_tqdm=disable_tqdm)
        for owner, (log_prob, _) in zip(owners, scores, strict=True):
            totals[owner] += log_prob
        return totals

    def _windows(self, text: str) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
        ids = self.tok_encode(text, add_special_tokens=False)  # the windows begin with `prefix_token_id` themselves
        windows = get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, 1)
        return map(make_disjoint_window, windows)

    def generate_until(self, requests: Sequence[Request], disable_tqdm: bool = True) -> list[str]:  # noqa: ARG002
        """Continue contexts as `adapt run --raw` would; the first text that cannot be continued ends it."""
        asked = [self._text(row, *request.args) for row, request in enumerate(requests, start=1)]
        session, answers = self._session, list[str]()
        with self._reporter.task("Generate", len(asked)) as task:
            for outcome in session.answer_all(asked, session.rows_at_once(self._at_once)):
                if isinstance(outcome, AdaptError):
                    raise outcome
                answers.append(outcome.text)
                task.advance()
        return answers

    def _text(self, row: int, context: str, settings: Mapping[str, Any]) -> Text:
        """What is to be continued: a beginning that leaves no room for the answer is cut off."""
        options = generation(settings, self._seed, row)
        most = min(options.max_tokens or NEW_TOKENS, self.max_length - 1)
        ids = self.tok_encode(context)[-(self.max_length - most) :]
        stops = Stops.of(self._tokens, options.stop)
        return Text(ids, options.sampling, stops, self.max_length, most, row, continues=True)


def generation(settings: Mapping[str, Any], seed: int, row: int) -> GenerationOptions:
    """Read a task's settings of generation. Raises UsageError for one that would change the text and is not known."""
    rest = dict(settings)
    until = rest.pop("until", None) or []
    lengths = [int(rest.pop(name)) for name in _LENGTHS if rest.get(name) is not None]
    known = {name: rest.pop(name) for name in _SAMPLING if rest.get(name) is not None}
    unknown = [name for name, value in rest.items() if value is not None and name not in _LENGTHS + _SAMPLING]
    if unknown:
        raise UsageError(f"A task generates with {unknown[0]}, which adapt does not have", "Choose other tasks.")
    temperature = float(known.pop("temperature", 1.0 if known.get("do_sample") else 0.0))
    sampled = known.pop("do_sample", temperature > 0)
    sampling = Sampling(temperature=temperature if sampled else 0.0, seed=seed, **(known if sampled else {}))
    stops = (until,) if isinstance(until, str) else tuple(until)
    return GenerationOptions(sampling, lengths[0] if lengths else NEW_TOKENS, tuple(s for s in stops if s), row=row)
