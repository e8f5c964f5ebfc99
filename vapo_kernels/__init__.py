"""Fused ops for value-based policy optimisation of language models.

Tensors on a CUDA device go through Triton kernels, CPU tensors through vectorised PyTorch;
`vapo_kernels.reference` holds the same ops as the equations read.
"""

from vapo_kernels.ops.gae import GAE, length_adaptive_lambda, packed_gae, padded_gae
from vapo_kernels.ops.linear_token_logprobs import linear_token_logprobs
from vapo_kernels.ops.policy_loss import PolicyLoss, linear_policy_loss, logprob_policy_loss, policy_loss
from vapo_kernels.ops.token_logprobs import TokenLogprobs, token_logprobs
from vapo_kernels.ops.value_loss import (
    ValueLoss,
    explained_variance,
    explained_variance_from,
    value_loss,
    value_moments,
)
from vapo_kernels.ops.whiten import masked_whiten

__all__ = [
    "GAE",
    "PolicyLoss",
    "TokenLogprobs",
    "ValueLoss",
    "explained_variance",
    "explained_variance_from",
    "length_adaptive_lambda",
    "linear_policy_loss",
    "linear_token_logprobs",
    "logprob_policy_loss",
    "masked_whiten",
    "packed_gae",
    "padded_gae",
    "policy_loss",
    "token_logprobs",
    "value_loss",
    "value_moments",
]
