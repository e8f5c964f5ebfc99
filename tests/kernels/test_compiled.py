"""What the kernels compile to, without a GPU, on every target they promise."""

import pytest

pytest.importorskip("triton")

from benchmarks import compiled

MAX_REGISTERS = {"gae": 168}
# A launch compiles anew with another of these and with nothing else.
FLAGS = {"policy_loss": "with or without a gradient", "gae": "packed or padded", "moments": "with or without y"}


@pytest.mark.parametrize("target", compiled.TARGETS)
def test_no_spill_and_128_bit_accesses(target):
    rows = compiled.compiled_for(target)
    assert {row.kernel for row in rows} >= {
        "gae", "token_logprobs", "token_logprobs_backward", "policy_loss", "rescale", "logprob_policy_loss",
        "value_loss", "moments", "whiten",
    }  # fmt: skip
    for row in rows:
        assert (row.spills, row.local_bytes) == (0, 0), row
        assert row.registers <= MAX_REGISTERS.get(row.kernel, 80), row

    rows = [row for row in rows if row.case in ("float32", "bfloat16", "bfloat16 every option")]
    assert len(rows) == 5 + 5 + 4
    for row in rows:
        assert row.loads == "128", row
        assert row.stores in ("128", "–"), row
    assert sum(row.stores == "128" for row in rows) == 3 + 3 + 2


def test_new_sizes_and_numbers_compile_nothing():
    for sweep, counts in compiled.run_compiled("compilations_of_sweeps", "sm_90").items():
        assert counts == {kernel: 2 if kernel in FLAGS else 1 for kernel in counts}, sweep
        assert len(counts) == (5 if "tokens" in sweep else 4), sweep
