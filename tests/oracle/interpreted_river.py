"""River's static token with the kernels that a GPU would launch, in Triton's interpreter. Run by test_captured.py."""

from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from adapt_llm.quant.flagged import FlaggedLinear
from adapt_llm.quant.quantizers import QUANTIZERS
from adapt_llm.runtime.captured import CapturedRiver
from adapt_llm.runtime.decoder import Decoder
from adapt_llm.runtime.exit_layers import exit_block
from adapt_llm.runtime.exits import NEVER, CosineExit
from adapt_llm.runtime.pass_store import PassStore
from adapt_llm.runtime.river import River
from adapt_llm.runtime.static_exits import DeviceRule
from adapt_llm.runtime.store import open_safetensors

CPU = torch.device("cpu")


@pytest.mark.parametrize("held", [0, 5])
@pytest.mark.parametrize("threshold", [-1.5, 0.2, 0.9, NEVER])
def test_the_rule_is_that_of_torch(threshold: float, held: int) -> None:
    thresholds = (NEVER, threshold, NEVER, NEVER)
    for position in (4, 5):
        at = torch.tensor([position])
        states = [torch.randn(1, 1, 1100)]
        states += [states[0] * 0.5 + torch.randn(1, 1, 1100), states[0], states[0] + torch.randn(1, 1, 1100)]
        found = []
        for interpreted in (False, True):
            rule = DeviceRule(thresholds, held=held, deepest=4, device=CPU, interpreted=interpreted)
            rule.begin()
            rule.ask(1, states[0], states[1], at)
            rule.ask(2, states[1], states[2], at)
            rule.ask(3, states[2], states[3], at)
            rule.ask(4, states[3], states[0], at)
            found.append((int(rule.flag), int(rule.depth)))
        assert found[0] == found[1]
    expected = threshold < 0.5
    assert (found[0] == (1, 2)) is expected
    assert (found[0] == (0, 4)) is not expected


def test_a_token_leaves_within_one_run_of_kernels(tiny_model: Callable, tiny: ModuleType) -> None:
    model = tiny_model("llama")
    store, exits = open_safetensors(model.folder), []
    for index in range(model.arch.num_layers):
        matrices = {
            matrix: QUANTIZERS["rtn"](store.read(matrix).float(), group_size=8)
            for matrix in model.arch.block_matrices(index)
        }
        exits.append(exit_block(model.arch, store, index, matrices, device="cpu", dtype=torch.float32))
    ids = tiny.random_ids(1, 8)
    river = River(model.decoder, exits, CosineExit((middle(model.decoder, ids), 1.0, -2.0)))
    expected = continued(river, ids)
    graphs = CapturedRiver(river, interpreted=True)
    found = continued(graphs, ids)
    flagged = graphs.graphs._token._blocks[2].down
    assert isinstance(flagged, FlaggedLinear)
    assert flagged.on_device
    assert [output.depth for output in found] == [output.depth for output in expected]
    assert len({output.depth for output in found}) > 1, "all tokens leave alike"
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.logits, theirs.logits, atol=1e-4, rtol=1e-4)


def middle(decoder: Decoder, ids: torch.Tensor) -> float:
    """A cosine that some tokens exceed behind the first block and some do not."""
    with torch.inference_mode():
        before = decoder.embed(ids)
        after = decoder.blocks[0](before, decoder.step(None, ids), PassStore(decoder.arch))
    return float(torch.cosine_similarity(before, after, dim=-1)[0, 3:].sort().values[2:4].mean())


def continued(model: River, ids: torch.Tensor) -> list:
    cache = model.new_cache(1, 256)
    with torch.inference_mode():
        model.prefill(ids[:, :3], cache)
        return [model.decode(ids[:, at : at + 1], cache) for at in range(3, ids.shape[1])]
