"""What is wrong by its values, not by its shape, is refused on the CPU before any work."""

import pytest
import torch

from vapo_kernels import (
    linear_token_logprobs,
    logprob_policy_loss,
    masked_whiten,
    packed_gae,
    padded_gae,
    policy_loss,
    token_logprobs,
    value_loss,
)

N, V = 4, 7
ZEROS, IDS, CU_SEQLENS = torch.zeros(N), torch.zeros(N, dtype=torch.long), torch.tensor([0, N])
LOGITS, MASK = torch.zeros(N, V), torch.tensor([True, True, True, False])
CALLS_WITH_A_MASK = [
    lambda mask: packed_gae(ZEROS, ZEROS, CU_SEQLENS, mask=mask),
    lambda mask: padded_gae(ZEROS[None], ZEROS[None], mask[None]),
    lambda mask: token_logprobs(LOGITS, IDS, mask=mask),
    lambda mask: linear_token_logprobs(LOGITS, torch.zeros(V, V), IDS, mask=mask),
    lambda mask: policy_loss(LOGITS, IDS, ZEROS, ZEROS, mask),
    lambda mask: logprob_policy_loss(ZEROS, ZEROS, ZEROS, mask),
    lambda mask: value_loss(ZEROS, ZEROS, mask),
    lambda mask: masked_whiten(ZEROS, mask),
]


@pytest.mark.parametrize("call", CALLS_WITH_A_MASK)
def test_a_mask_holds_0_and_1_alone(call):
    # The additive mask of attention, which would be taken inverted; segment numbers; a probability; NaN.
    for wrong in ([-torch.inf, 0, 0, 0], [0.0, 1.0, 2.0, 3.0], [0.3, 1, 1, 1], [torch.nan, 1, 1, 1]):
        with pytest.raises(ValueError, match="mask: expected 0 and 1 alone"):
            call(torch.tensor(wrong))
    with pytest.raises(ValueError, match="got 2"):
        call(torch.tensor([2, 1, 1, 1]))
    for dtype in (torch.bool, torch.uint8, torch.int64, torch.float32, torch.bfloat16):
        call(MASK.to(dtype))


def test_is_correct_holds_0_and_1_alone():
    with pytest.raises(ValueError, match="is_correct: expected 0 and 1 alone"):
        policy_loss(LOGITS, IDS, ZEROS, ZEROS, MASK, is_correct=torch.tensor([0.5, 1, 1, 1]))


@pytest.mark.parametrize("name", ["lam_policy", "lam_critic"])
def test_a_tensor_of_lambdas_has_the_range_of_a_number(name):
    for wrong in (1.7, -0.1, torch.nan):
        with pytest.raises(ValueError, match=rf"{name}: expected numbers in \[0, 1\]"):
            packed_gae(ZEROS, ZEROS, CU_SEQLENS, **{name: torch.tensor([wrong])})
    packed_gae(ZEROS, ZEROS, CU_SEQLENS, **{name: torch.tensor([1.0])})


@pytest.mark.parametrize("wrong", [0.0, -1.0, torch.nan, torch.inf])
def test_temperatures_are_positive_where_the_mask_is_true(wrong):
    temperature = torch.tensor([1.0, wrong, 1.0, 1.0])
    for call in (
        lambda: token_logprobs(LOGITS, IDS, temperature=temperature),
        lambda: policy_loss(LOGITS, IDS, ZEROS, ZEROS, MASK, temperature=temperature),
    ):
        with pytest.raises(ValueError, match="temperature: expected finite numbers > 0"):
            call()
    # Token 3 is masked: its temperature is not read.
    policy_loss(LOGITS, IDS, ZEROS, ZEROS, MASK, temperature=temperature.roll(2))
