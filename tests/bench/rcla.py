"""Held-out perplexity by retention, of several R-CLA bundles of one model, side by side: from their manifests.

    adapt convert MODEL --method rcla --share-every 4 --data wiki.txt --steps 300 -o rcla
    adapt convert MODEL --method rcla --share-every 1 --cross-prob 0 --data wiki.txt --steps 300 -o plain
    adapt convert MODEL --method rcla --keep-ratio 0.25 --data wiki.txt --steps 300 -o searched
    python tests/bench/rcla.py "fine-tuned alike"=plain R-CLA=rcla searched=searched

Every conversion measures its weights under all layers, every 2nd and every 4th, and under its own map. The bundles must
have been measured on the same text; a map that a bundle was not measured under is left blank.
"""

import argparse
import sys
from itertools import pairwise
from pathlib import Path

from adapt_llm.runtime.manifest import MANIFEST_NAME, Manifest, read_manifest
from adapt_llm.runtime.methods import Rcla

KVMap = tuple[int, ...]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("bundles", nargs="+", metavar="NAME=FOLDER")
    named = dict(each.rpartition("=")[::2] for each in parser.parse_args().bundles)
    manifests = {name: read_manifest(Path(folder) / MANIFEST_NAME) for name, folder in named.items()}
    check_alike(manifests)
    for line in [*settings(manifests), "", *table(manifests)]:
        print(line)


def rcla_of(manifest: Manifest) -> Rcla:
    found = manifest.method(Rcla)
    if found is None:
        sys.exit(f"{manifest.base.id} is not an R-CLA bundle")
    return found


def check_alike(manifests: dict[str, Manifest]) -> None:
    """Another text or another model would compare nothing."""
    for what in ("text", "tokens", "dense_perplexity"):
        seen = {name: getattr(manifest.quality, what) for name, manifest in manifests.items()}
        if len(set(seen.values())) > 1:
            sys.exit(f"the bundles were not measured alike: {what} is {seen}")


def settings(manifests: dict[str, Manifest]) -> list[str]:
    first = next(iter(manifests.values()))
    lines = [f"{first.base.id}: {first.quality.tokens} tokens of {first.quality.text}"]
    for name, manifest in manifests.items():
        rcla = rcla_of(manifest)
        if (run := rcla.training) is not None:
            what = "all weights" if run.lora_rank is None else f"LoRA of rank {run.lora_rank}"
            size = f"{run.steps} steps of {run.sequences_per_step} x {run.sequence_length} tokens ({run.tokens} in all)"
            drawn = f"p = {rcla.cross_prob} ({rcla.cross_draw or 'layers'}), plain passes {rcla.plain_passes or 0:.0%}"
            taught = "" if rcla.distill is None else f", distilled x {rcla.distill:g}"
            lines.append(f"{name}: {size} of {run.data.name}, rate {run.learning_rate:g}, {what}, {drawn}{taught}")
    return lines


def table(manifests: dict[str, Manifest]) -> list[str]:
    """One row a map, largest cache first."""
    columns = {name: {p.kv_sources: p for p in rcla_of(m).retention} for name, m in manifests.items()}
    maps: list[KVMap] = sorted({each for points in columns.values() for each in points}, key=lambda m: -len(set(m)))
    lines = [
        f"| cache | layers that keep one | as it came | {' | '.join(columns)} |",
        "|--:|---|" + "--:|" * (1 + len(columns)),
    ]
    for each in maps:
        points = [points.get(each) for points in columns.values()]
        source = next(point.source for point in points if point is not None)
        cells = ["" if point is None or point.trained is None else f"{point.trained:.2f}" for point in points]
        share = len(set(each)) / len(each)
        lines.append(f"| {share:.0%} | {keepers(each)} | {source:.2f} | {' | '.join(cells)} |")
    return lines


def keepers(sources: KVMap) -> str:
    kept = sorted(set(sources))
    gaps = {after - before for before, after in pairwise(kept)}
    if len(kept) == len(sources):
        return "all"
    return f"every {gaps.pop()}" if len(gaps) == 1 and len(kept) > 2 else " ".join(map(str, kept))


if __name__ == "__main__":
    main()
