"""What fits in device memory: amounts as people write them, blocks as they fit."""

import pytest

from adapt_llm.errors import ResourceError, UsageError
from adapt_llm.runtime.offload import MARGIN, parse_memory, plan_resident

GIB = 2**30


@pytest.mark.parametrize(
    ("text", "expected"),
    [("auto", 5), ("90%", 90), ("8GiB", 8 * GIB), ("8G", 8 * GIB), ("8GB", 8 * 10**9), ("512mib", GIB // 2), ("7", 7)],
)
def test_amounts(text: str, expected: int) -> None:
    assert parse_memory(text, free=5, total=100) == expected


@pytest.mark.parametrize("text", ["", "-1GiB", "0", "8 parsecs", "GiB", "%", "1e9", "nan"])
def test_what_is_no_amount_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="no amount of memory"):
        parse_memory(text, free=5, total=100)


@pytest.mark.parametrize("budget", [range(120, 1400, 37)])
def test_the_plan_fits_and_one_block_more_does_not(budget: range) -> None:
    for amount in budget:
        plan = plan_resident(budget=amount, fixed=100, per_block=10, num_layers=100, least=1)
        usable = amount * (1 - MARGIN)
        assert plan.fixed + plan.resident * plan.per_block <= usable
        assert plan.resident == 100 or plan.fixed + (plan.resident + 1) * plan.per_block > int(usable)


def test_too_little_memory_is_told_with_the_need() -> None:
    with pytest.raises(ResourceError, match=r"1\.00 GiB of device memory do not hold the river: it needs 2\.2"):
        plan_resident(budget=GIB, fixed=2 * GIB, per_block=GIB // 16, num_layers=32, least=1)


def test_a_plan_is_said_in_one_line() -> None:
    plan = plan_resident(budget=10 * GIB, fixed=5 * GIB, per_block=GIB, num_layers=32, least=1)
    assert plan.describe(32, "drop") == (
        "4 of 32 backbone blocks in 9.00 GiB of device memory; the other 28 are not loaded."
    )
