"""Whether a model's logits are its output head's alone, so that a loss may start from hidden states."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from vapo.models.sharding import inside


def plain_head(policy: PreTrainedModel) -> nn.Linear | None:
    """The output head, if the model's logits are ``hidden @ weight.T + bias`` and nothing more.

    A plain head may be tied to the embeddings. A head with an adapter is not plain, nor is that of a model that caps or
    scales its logits or the hidden states before the head. The first call runs the model once to find out, on every
    rank; later calls return the same answer.
    """
    head = policy.get_output_embeddings()
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        return None
    if not hasattr(policy, "has_plain_head"):
        # Without gradients a sharded model gives its whole parameters back afterwards.
        with torch.no_grad():
            policy.has_plain_head = inside(policy, _logits_are_the_heads)
    return head if policy.has_plain_head else None


def _logits_are_the_heads(policy: PreTrainedModel) -> bool:
    """Replace the head's output by known numbers: are they the logits, and were the backbone's states its input?"""
    seen: dict[str, torch.Tensor] = {}
    head = policy.get_output_embeddings()

    def put_numbers(module: nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        seen["head_input"] = inputs[0]
        # Large ones: a soft cap hardly shows in the small logits of an untrained model.
        seen["numbers"] = torch.linspace(-100, 100, output.numel(), device=output.device).to(output).view_as(output)
        return seen["numbers"]

    def keep_states(module: nn.Module, inputs: tuple[torch.Tensor], output: Any) -> None:
        seen["states"] = getattr(output, "last_hidden_state", None)

    attention = policy.config._attn_implementation
    if attention == "flash_attention_2":
        # It runs neither in float32 nor on the CPU; the head is the same for any attention.
        policy.set_attn_implementation("sdpa")
    hooks = [head.register_forward_hook(put_numbers), policy.base_model.register_forward_hook(keep_states)]
    try:
        # Not the module's call: inside a sharded root's forward that would begin another one.
        ids = torch.ones(1, 2, dtype=torch.long, device=policy.device)
        logits = policy.forward(input_ids=ids, use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()
        if attention == "flash_attention_2":
            policy.set_attn_implementation(attention)
    if "numbers" not in seen or seen["states"] is None:
        return False
    return torch.equal(logits.float(), seen["numbers"].float()) and torch.equal(seen["head_input"], seen["states"])
