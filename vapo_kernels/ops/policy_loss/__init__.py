"""The policy loss of VAPO: clipped surrogate, positive-example NLL, KL and entropy (Eq. 3, 4, 16, 17)."""

from vapo_kernels.ops.policy_loss.from_hidden import linear_policy_loss
from vapo_kernels.ops.policy_loss.from_logits import policy_loss
from vapo_kernels.ops.policy_loss.from_logprobs import logprob_policy_loss
from vapo_kernels.ops.policy_loss.terms import MAX_LOG_RATIO, PolicyLoss

__all__ = ["MAX_LOG_RATIO", "PolicyLoss", "linear_policy_loss", "logprob_policy_loss", "policy_loss"]
