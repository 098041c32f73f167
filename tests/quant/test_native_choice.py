"""Which instruction set multiplies, and what is said where the C module is missing."""

import subprocess
import sys
from typing import Any

import pytest

from adapt_llm.quant.kernels import native


@pytest.mark.skipif(not native.available(), reason=f"no native module: {native.why_not()}")
def test_a_wrong_instruction_set_is_not_used() -> None:
    """The check at load finds a product that confuses two rows."""
    module: Any = type("Module", (), {})()
    library: Any = native._load()
    module.dense, module.int4 = library.dense, library.int4
    scalar = library.isas["scalar"]
    assert native._agrees(module, scalar, scalar)
    wrong = len(library.isas) + 100

    def dense(team: int, threads: int, isa: int, x: int, M: int, K: int, w: int, *rest: int) -> None:
        library.dense(team, threads, scalar, x, M, K, w + (2 * K if isa == wrong else 0), rest[0] - 1, *rest[1:])

    module.dense = dense
    assert not native._agrees(module, wrong, scalar)


def test_without_the_module_the_reason_is_said() -> None:
    code = (
        "import sys; sys.modules['adapt_llm.quant.kernels._native'] = None\n"
        "from adapt_llm.quant.kernels import native\n"
        "assert not native.available() and native.instruction_sets() == ()\n"
        "print(native.why_not())"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "not built" in done.stdout
