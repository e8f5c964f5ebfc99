"""Every loss that has a gradient, with inputs for it."""

from draws import linear_inputs, policy_inputs, value_inputs

from vapo_kernels import linear_policy_loss, logprob_policy_loss, policy_loss, value_loss


def logprob_inputs(shape, device, **settings) -> dict:
    inputs = policy_inputs(shape, 9, device=device)
    logprobs = inputs.pop("logits").log_softmax(-1)
    inputs["logprobs"] = logprobs.gather(-1, inputs.pop("token_ids").unsqueeze(-1)).squeeze(-1)
    return {**inputs, **settings}


def losses(device, n=5) -> dict:
    """Every loss with a gradient: its op, inputs, and what it differentiates."""
    return {
        "policy_loss": (policy_loss, policy_inputs((n,), 70, device=device), "logits"),
        "linear_policy_loss": (linear_policy_loss, linear_inputs((n,), 4, 70, device=device), "hidden"),
        "logprob_policy_loss": (logprob_policy_loss, logprob_inputs((n,), device), "logprobs"),
        "value_loss": (value_loss, {**value_inputs((n,), device=device), "clip": 0.2}, "values"),
    }


LOSSES = list(losses("cpu"))
