"""Speed against KL of every kind of exit rule, on a text that no rule was made on: a table and a picture.

python tests/bench/frontier.py BUNDLE --made-on wiki.utf8 --text c4.utf8 --plot frontier.png
    [--tokens 512] [--held-out 2048] [--held 1] [--block-ms DENSE,RIVER,REST] [--lossless X] [--threads 2]
    [--json FILE] [--figures FILE]

The paper's rule with one threshold, a threshold by block, blocks that stay dense (chosen by their measured sensitivity,
and for comparison the last ones), all 4-bit, dense, and lossless River. Speeds follow from the blocks that tokens run
and what a block takes here, or as given; --lossless is the speed of that mode over dense, measured where not given.
--held N: so many tokens at the beginning of a sequence never leave, whatever the rule; 0 is the paper.
--figures takes what an earlier run wrote with --json (same model, texts, --held) and draws it with the speeds of now.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from adapt_llm.cli.frontier_picture import save_frontier
from adapt_llm.convert.calibration import SEQUENCE
from adapt_llm.convert.judge import loss
from adapt_llm.convert.river_sweep import DENSE, FLOOR, Candidate, candidates, dense_blocks
from adapt_llm.runtime.block_speed import CONTEXT, TOKENS, measure_blocks, measure_greedy
from adapt_llm.runtime.bundle import Bundle
from adapt_llm.runtime.decoder import load_frame
from adapt_llm.runtime.exit_quality import Files, measure, measure_errors
from adapt_llm.runtime.exit_rules import sizes
from adapt_llm.runtime.exits import HELD
from adapt_llm.runtime.loading import load_river, river_route
from adapt_llm.runtime.lossless import LosslessRiver
from adapt_llm.runtime.methods import River
from adapt_llm.runtime.options import SessionOptions
from adapt_llm.runtime.progress import SilentReporter
from adapt_llm.runtime.text import Tokenizer
from adapt_llm.runtime.tuned import BlockSpeed

KINDS = {
    "tau ": "one tau (paper)",
    "tau by block": "tau by block",
    "dense": "stay dense, sensitive",
    "last": "last ones",
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--made-on", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--held-out", type=int, default=2048)
    parser.add_argument("--held", type=int, default=HELD)
    parser.add_argument("--block-ms")
    parser.add_argument("--lossless", type=float)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--figures", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    bundle = Bundle.open(arguments.bundle)
    settings, count = bundle.manifest.method(River), bundle.architecture.num_layers
    made_on, held_out = (
        sequences(bundle, path, tokens)
        for path, tokens in ((arguments.made_on, arguments.tokens), (arguments.text, arguments.held_out))
    )
    speed = timed(bundle, settings, made_on) if arguments.block_ms is None else given(arguments.block_ms)
    lossless = arguments.lossless or speed.lossless_speedup(count)
    if arguments.figures is None:
        rows = measured(bundle, settings, made_on, held_out, arguments.held)
    else:
        rows = json.loads(arguments.figures.read_text(encoding="utf-8"))["rows"]
    rows = [{**row, "speedup": speed.speedup(row["dense_blocks"], count)} for row in rows]
    print(f"{bundle.path.name}: rules made on {made_on.numel()} tokens of {arguments.made_on.name}, judged on")
    print(f"{held_out.numel()} of {arguments.text.name}; {speed.model_dump_json()}\n")
    print("\n".join(table(rows, lossless)))
    if arguments.json:
        arguments.json.write_text(json.dumps({"speed": speed.model_dump(), "rows": rows}, indent=2), encoding="utf-8")
    if arguments.plot:
        save_frontier(arguments.plot, series(rows, lossless), title=bundle.path.name, loses="KL from dense, nats")


def measured(
    bundle: Bundle, settings: River, made_on: torch.Tensor, held_out: torch.Tensor, held: int
) -> list[dict[str, Any]]:
    """Every rule's quality on `held_out` [n, S], and the dense blocks a token runs under it."""
    frame = load_frame(bundle.architecture, bundle.backbone, (), device="cpu", dtype=torch.bfloat16)
    files, count = Files(frame, bundle.backbone, bundle.river), bundle.architecture.num_layers
    errors = measure_errors(files, made_on, settings.entry_layer, SilentReporter(), held=held)
    rules = [*candidates(errors, settings.entry_layer), *last(count, settings.entry_layer)]
    routes = [replace(river_route(rule.under(settings), count), held=held) for rule in rules]
    found = measure(files, held_out, routes, SilentReporter())
    return [
        {
            "rule": rule.name,
            "settings": dict(rule.settings),
            "dense_blocks": dense_blocks(quality, rule.settings),
            "kl": quality.kl,
            "loss": loss(quality, found[0]),
            "agreement": quality.agreement,
            "mean_depth": quality.mean_depth,
        }
        for rule, quality in zip(rules, found, strict=True)
    ]


def sequences(bundle: Bundle, path: Path, tokens: int) -> torch.Tensor:
    length = min(SEQUENCE, tokens)
    ids = Tokenizer.load(bundle.path).encode(path.read_text(encoding="utf-8"), add_special_tokens=False)
    return torch.tensor(ids)[: tokens // length * length].view(-1, length)


def timed(bundle: Bundle, settings: River, ids: torch.Tensor) -> BlockSpeed:
    model = load_river(bundle, SessionOptions(device="cpu"))
    start = ids.flatten()[None, : CONTEXT + TOKENS]
    speed = measure_blocks(model, settings.entry_layer, start)
    drafts = LosslessRiver(model, entry_layer=settings.entry_layer)
    return speed.model_copy(update={"lossless_ms": measure_greedy(drafts, start)})


def given(text: str) -> BlockSpeed:
    dense, river, rest = (float(part) for part in text.split(","))
    return BlockSpeed(
        device="given", threads=1, dtype="bfloat16", dense_block_ms=dense, river_block_ms=river, rest_ms=rest
    )


def last(count: int, entry_layer: int) -> list[Candidate]:
    return [
        Candidate.of(f"last {size}", tau=-1.0, dense_layers=frozenset(range(count - size + 1, count + 1)))
        for size in sizes(count, entry_layer)
    ]


def kind_of(name: str) -> str | None:
    for begin in ("tau by block", "tau ", "last"):
        if name.startswith(begin):
            return KINDS[begin]
    return KINDS["dense"] if name.endswith(" dense") else None


def series(rows: list[dict], lossless: float | None) -> dict[str, list[tuple[float, float]]]:
    """Every kind of rule from the dense model to all 4-bit."""
    spots = {row["rule"]: (row["speedup"], row["kl"]) for row in rows}
    found = {kind: [spots[DENSE], spots[FLOOR]] for kind in KINDS.values()}
    for name, spot in spots.items():
        if (kind := kind_of(name)) is not None:
            found[kind].append(spot)
    found |= {DENSE: [spots[DENSE]], FLOOR: [spots[FLOOR]]}
    return found if lossless is None else {**found, "lossless": [(lossless, 0.0)]}


def table(rows: list[dict], lossless: float | None) -> Iterator[str]:
    yield "| rule | dense blocks | speed over dense | KL | growth of perplexity | same next token |"
    yield "|---|--:|--:|--:|--:|--:|"
    if lossless is not None:
        yield f"| lossless |  | {lossless:.2f} | 0 | 0 | 100% |"
    for row in sorted(rows, key=lambda row: row["speedup"]):
        cells = [f"{row['dense_blocks']:.1f}", f"{row['speedup']:.2f}", f"{row['kl']:.4f}", f"{row['loss']:.1%}"]
        yield f"| {row['rule']} | {' | '.join(cells)} | {row['agreement']:.1%} |"


if __name__ == "__main__":
    main()
