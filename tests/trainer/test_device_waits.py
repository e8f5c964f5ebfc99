"""Between the plan of the micro-batches and the metrics, no optimiser step and no pass waits for the device.

They run on the meta device, whose tensors have no content: whatever would copy a number to the host raises there. A
mode refuses what the meta device lets pass.
"""

from contextlib import nullcontext
from dataclasses import fields, replace

import pytest
import torch
from families import tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

from vapo.config import Config
from vapo.learning.update import MiniBatch, accumulate_policy_loss, accumulate_value_loss, count_tokens
from vapo.models import forward
from vapo.models.forward import all_rows, final_values, micro_batches, rollout_logprobs, rollout_values
from vapo.models.load import critic_from_policy
from vapo.models.output_head import plain_head

SETTINGS = {"token_level_loss": False, "kl_weight": 0.1, "entropy_weight": 0.1, "value_clip": 0.2}


class Refusing(TorchDispatchMode):
    """Refuses to write under a mask of True and False, which looks for the True ones, and to copy from the host."""

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        name = op.overloadpacket.__name__
        if name.startswith("index_put"):
            assert all(index is None or index.dtype != torch.bool for index in args[1])
        if name in ("_to_copy", "copy_"):
            assert args[-1].device.type == "meta"
        return op(*args, **kwargs or {})


def on_meta(item):
    """A Rollout or Batch whose tensors are on the meta device."""
    values = {field.name: getattr(item, field.name) for field in fields(item)}
    return replace(item, **{name: each.to("meta") for name, each in values.items() if hasattr(each, "to")})


@pytest.fixture
def plans(rollout, monkeypatch):
    """The micro-batches are planned on the CPU; returns how many each plan has."""
    made = []

    def plan(_, rows, max_tokens):
        parts = micro_batches(rollout, torch.arange(len(rows)), max_tokens)
        made.append(len(parts))
        return [replace(part, rows=torch.empty_like(part.rows, device="meta")) for part in parts]

    monkeypatch.setattr(forward, "micro_batches", plan)
    return made


@pytest.fixture(params=["padded", "packed", "whole head"])
def models(request, monkeypatch):
    """Policy and critic on the meta device; transformers itself waits once a forward pass, which is left out."""
    policy = tiny_model("llama")
    critic = critic_from_policy(policy)
    assert plain_head(policy) is not None
    policy.has_plain_head = request.param != "whole head"
    monkeypatch.setattr(forward, "takes_packed_rows", lambda model: request.param == "packed")
    # Autocast does not know the meta device.
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
    # masking_utils asks there whether positions start anew.
    monkeypatch.setattr("transformers.masking_utils.find_packed_sequence_indices", lambda position_ids: None)
    return policy.to("meta"), critic.to("meta")


@pytest.mark.parametrize(("micro_batch_tokens", "num_parts"), [(1, 4), (13, 3)])
def test_nothing_waits_for_the_device_between_plan_and_metrics(
    models, plans, rollout, batch_of, micro_batch_tokens, num_parts
):
    (policy, critic), batch = models, batch_of(ref_logprobs=torch.zeros(11), importance_weights=torch.ones(11))
    counts = count_tokens(batch, [all_rows(rollout)])[0]
    batch = replace(on_meta(batch), rollout=on_meta(rollout))
    part = MiniBatch(all_rows(batch.rollout), counts.to("meta"))
    config = Config(micro_batch_tokens=micro_batch_tokens, **SETTINGS)
    read = (batch.rollout, part.rows, config, False)
    with Refusing():
        found = {
            "policy loss": accumulate_policy_loss(policy, batch, part, config),
            "value loss": accumulate_value_loss(critic, batch, part, config, value_clip=config.value_clip),
            "log-probs": rollout_logprobs(policy, batch.rollout, config),
            "values": rollout_values(critic, batch.rollout, config),
            "values after the last token": forward._results(critic, final_values, *read),
        }
    assert {name: each.shape[0] for name, each in found.items()} == {
        **{"policy loss": 7, "value loss": 2, "log-probs": 11, "values": 11, "values after the last token": 4}
    }
    assert all(parameter.grad is not None for model in models for parameter in model.parameters())
    assert plans == [num_parts] * 5


def test_a_plan_waits_for_the_device_once(rollout, monkeypatch):
    reads, tolist = [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: reads.append(tensor) or tolist(tensor))
    for max_tokens in (1, 1000):
        reads.clear()
        micro_batches(rollout, all_rows(rollout), max_tokens)
        assert len(reads) == 1
