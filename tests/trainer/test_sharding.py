"""Many ranks do what one process does: real processes, gloo, the same sums of gradients and the same weights."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from families import tiny_model
from ranks import run_on_ranks
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, PreTrainedModel

from vapo.models import sharding
from vapo.models.load import critic_from_policy, set_gradient_checkpointing
from vapo_kernels import linear_policy_loss, value_loss

CPU = torch.device("cpu")
VOCAB, ROWS, WIDTH = 23, 6, 9
NUM_TOKENS = ROWS * (WIDTH - 1)
# Rows of each rank, by the number of ranks: not the same number, and none for one.
SHARES = {1: [6], 2: [2, 4], 3: [2, 0, 4], 4: [2, 0, 1, 3]}


def build(kind: str) -> PreTrainedModel:
    model = tiny_model("qwen3", vocab_size=VOCAB, tie_word_embeddings=kind != "untied")
    if kind == "critic":
        model = critic_from_policy(model)
        nn.init.normal_(model.score.weight, std=0.1, generator=torch.Generator().manual_seed(2))
    return model


def token_rows() -> Tensor:
    return torch.randint(VOCAB, (ROWS, WIDTH), generator=torch.Generator().manual_seed(1))


def policy_body(model: PreTrainedModel, ids: Tensor, counts: bool = True) -> Tensor:
    """[], the policy loss of rows of tokens over the tokens of all rows; 0 for rows that do not count."""
    hidden = model.base_model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state.flatten(0, 1)
    weight = model.get_output_embeddings().weight
    assert type(weight) is nn.Parameter and weight.shape == (VOCAB, 32)
    targets, mask = ids[:, 1:].flatten(), torch.full((len(hidden),), counts)
    advantages, old_logprobs = targets.float() - VOCAB / 2, torch.full((len(hidden),), -3.0)
    return linear_policy_loss(hidden, weight, targets, old_logprobs, advantages, mask, num_tokens=NUM_TOKENS).loss


def logits_body(model: PreTrainedModel, ids: Tensor, counts: bool = True) -> Tensor:
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits.flatten(0, 1).float()
    return counts * torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten(), reduction="sum") / NUM_TOKENS


def critic_body(model: PreTrainedModel, ids: Tensor, counts: bool = True) -> Tensor:
    hidden = model.base_model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state.flatten(0, 1)
    values = model.score(hidden).squeeze(-1).float()
    mask = torch.full_like(values, counts)
    return value_loss(values, ids[:, 1:].flatten() / VOCAB, mask, num_tokens=NUM_TOKENS).loss


BODIES = {"tied": policy_body, "untied": policy_body, "critic": critic_body, "logits": logits_body}


def accumulate(model: PreTrainedModel, kind: str) -> None:
    """Add the gradient of this rank's rows, a row at a time; one without rows left computes one that does not count."""
    mine = token_rows().split(SHARES[sharding.world_size()])[sharding.rank()]
    for number in range(sharding.max_over_ranks(len(mine))):
        counts = number < len(mine)
        row = mine[number : number + 1] if counts else token_rows()[:1]
        sharding.inside(model, BODIES[kind], row, counts).backward()


def train(kind: str, checkpointing: bool = False, shard_ranks: int = 0) -> dict[str, Any]:
    """Two optimiser steps; the gradients of the first, the norms, and the weights after the second.

    "copies" is how often all ranks together hold the model, 1 where it is not sharded.
    """
    model = build(kind)
    if checkpointing:
        set_gradient_checkpointing(model, True)
    sharding.shard(model, torch.float32, CPU, mesh=sharding.device_mesh(CPU, shard_ranks))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5)
    gradients, norms = {}, []
    for _ in range(2):
        accumulate(model, kind)
        assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())
        gradients = gradients or {name: sharding.whole(each.grad).clone() for name, each in model.named_parameters()}
        norms.append(sharding.clip_grad_norm(model, 0.1))
        optimizer.step()
        optimizer.zero_grad()
    held = sum((each.to_local() if hasattr(each, "to_local") else each).numel() for each in model.parameters())
    return {
        "gradients": gradients,
        "norms": norms,
        "parameters": {name: sharding.whole(each).detach() for name, each in model.named_parameters()},
        "weights": sharding.full_state_dict(model),
        "copies": int(sharding.sum_over_ranks(torch.tensor(held))) / model.num_parameters(),
    }


def assert_close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def train_all(shard_ranks: int = 0) -> dict[str, dict[str, Any]]:
    found = {kind: train(kind, shard_ranks=shard_ranks) for kind in BODIES}
    return found | {"checkpointed": train("tied", checkpointing=True, shard_ranks=shard_ranks)}


@pytest.fixture(scope="module")
def in_one_process() -> dict[str, dict[str, Any]]:
    torch.use_deterministic_algorithms(True)
    return train_all()


@pytest.mark.parametrize(("num_ranks", "shard_ranks"), [(1, 0), (2, 0), (3, 0), (2, 1), (4, 2)])
def test_ranks_step_as_one_process_does(
    in_one_process: dict[str, dict[str, Any]], num_ranks: int, shard_ranks: int
) -> None:
    assert_close(in_one_process["checkpointed"], in_one_process["tied"])
    copies = num_ranks / (shard_ranks or num_ranks)
    on_ranks = run_on_ranks(num_ranks, train_all, shard_ranks)
    for rank, found in enumerate(on_ranks):
        for kind, expected in in_one_process.items():
            # Exports are rank 0's.
            weights = {} if rank else expected["weights"]
            assert_close(found[kind], expected | {"weights": weights, "copies": copies})
            # Replicas do not drift apart.
            for name in ("gradients", "parameters"):
                torch.testing.assert_close(found[kind][name], on_ranks[0][kind][name], rtol=0, atol=0)
            assert min(expected["norms"]) > 0.1, "nothing was clipped"


def seen_in_bfloat16() -> dict[str, Any]:
    model = build("tied")
    sharding.shard(model, torch.bfloat16, CPU)
    seen = {}

    def body(model: PreTrainedModel, ids: Tensor, numbers: Tensor) -> Tensor:
        positions = torch.arange(300, 300 + ids.shape[1])[None]
        model.base_model.layers[0].register_forward_pre_hook(
            lambda module, args, kwargs: seen.update(layer=args[0].dtype, positions=kwargs["position_ids"]),
            with_kwargs=True,
        )
        out = model.base_model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
        seen.update(hidden=out.dtype, head=model.get_output_embeddings().weight.dtype, numbers=numbers.dtype)
        seen.update(frequencies=model.base_model.rotary_emb.inv_freq.dtype)
        return (out.float() * numbers).sum()

    # 257 has no exact bfloat16. Rank 1 adds a 256th, which would be lost beside rank 0's gradient in bfloat16.
    numbers = torch.full((32,), 257.0) / 256 ** sharding.rank()
    sharding.inside(model, body, token_rows()[:1], numbers).backward()
    seen["norm"] = sharding.whole(model.base_model.norm.weight.grad)
    seen["stored"] = {each.dtype for each in model.parameters()} | {each.grad.dtype for each in model.parameters()}
    return seen


def test_layers_compute_in_bfloat16_and_gradients_add_up_in_float32() -> None:
    one, two = run_on_ranks(1, seen_in_bfloat16)[0], run_on_ranks(2, seen_in_bfloat16)[0]
    for seen in (one, two):
        assert seen["layer"] == seen["hidden"] == seen["head"] == torch.bfloat16
        assert seen["numbers"] == seen["frequencies"] == torch.float32
        assert seen["positions"].tolist() == [list(range(300, 300 + WIDTH))]
        assert seen["stored"] == {torch.float32}
    assert torch.equal(two["norm"], one["norm"] * (1 + 1 / 256))


@torch.no_grad()
def decode(model: PreTrainedModel, num_steps: int) -> list[Tensor]:
    """Logits of ``num_steps`` tokens, each the likeliest one, with a cache; every other step goes through `inside`."""

    def step(model: PreTrainedModel, ids: Tensor, cache: DynamicCache) -> Tensor:
        hidden = model.base_model(input_ids=ids, use_cache=True, past_key_values=cache).last_hidden_state
        return model.get_output_embeddings()(hidden[:, -1])

    cache, ids, logits = DynamicCache(config=model.config), token_rows()[:2], []
    for number in range(num_steps):
        logits.append(sharding.inside(model, step, ids, cache) if number % 2 else step(model, ids, cache))
        ids = logits[-1].argmax(-1)[:, None]
    return logits


class Collectives(TorchDispatchMode):
    """Counts the collectives of a rank."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += "c10d" in function.namespace
        return function(*args, **(kwargs or {}))


def sample_unevenly() -> dict[str, Any]:
    model = build("untied")
    sharding.shard(model, torch.float32, CPU)
    with sharding.gathered(model), Collectives() as within:
        logits = decode(model, 2 + 3 * sharding.rank())
        with torch.no_grad():
            logits.append(model(input_ids=token_rows()[:1]).logits)
    assert all(hasattr(parameter, "full_tensor") for parameter in model.parameters()), "not resharded"
    with Collectives() as outside, torch.no_grad():
        sharding.inside(model, policy_body, token_rows())
    accumulate(model, "untied")
    return {
        "logits": logits,
        "collectives": (outside.count, within.count),
        "gradients": {name: sharding.whole(each.grad) for name, each in model.named_parameters()},
    }


def test_gathered_ranks_sample_different_numbers_of_tokens_without_communication() -> None:
    expected = decode(build("untied"), 5)
    gradients = train("untied")["gradients"]
    for rank, each in enumerate(run_on_ranks(2, sample_unevenly)):
        # One for each of the two layers and the root, without `gathered`.
        assert each["collectives"] == (3, 0)
        assert len(each["logits"]) == 3 + 3 * rank
        for mine, single in zip(each["logits"][:-1], expected, strict=False):
            torch.testing.assert_close(mine, single)
        assert_close(each["gradients"], gradients)


def forward_step_forward() -> list[Tensor]:
    model = build("tied")
    sharding.shard(model, torch.float32, CPU)
    accumulate(model, "tied")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for number in range(2):
        with torch.no_grad(), sharding.gathered(model) if number else nullcontext():
            losses.append(sharding.inside(model, policy_body, token_rows()))
        optimizer.step()
        with torch.no_grad():
            losses.append(sharding.inside(model, policy_body, token_rows()))
    return losses


def test_a_forward_without_gradient_sees_the_stepped_weights() -> None:
    expected = forward_step_forward()
    assert len({loss.item() for loss in expected}) == 3
    for losses in run_on_ranks(2, forward_step_forward):
        torch.testing.assert_close(losses, expected)


def reduce_over_ranks() -> dict[str, Any]:
    rank = sharding.rank()
    return {
        "sum": sharding.sum_over_ranks(torch.tensor([0.25, rank], dtype=torch.float64)),
        "ints": sharding.sum_over_ranks(torch.tensor(2**40 + rank)),
        "max": sharding.max_over_ranks(-rank),
        "rows": sharding.gather_over_ranks(torch.full((rank, 2), rank + 0.1, dtype=torch.float64)),
        "flags": sharding.gather_over_ranks(torch.tensor([True, False])[:rank]),
        "nothing": sharding.gather_over_ranks(torch.zeros(0, 3)),
        "columns": sharding.gather_over_ranks(torch.arange(6).view(2, 3).t() + 10 * rank),
        "mean": sharding.mean_over_ranks(torch.arange(rank)),
        "empty mean": sharding.mean_over_ranks(torch.zeros(0)),
        "objects": sharding.gather_objects(rank),
        "share": sharding.share_of(range(7)),
        "first": sharding.on_first_rank(lambda: ("from", rank)[1]),
        "place": (rank, sharding.world_size()),
    }


def test_sums_maxima_means_and_rows_of_all_ranks() -> None:
    column = torch.arange(6).view(2, 3).t()
    expected = {
        "sum": torch.tensor([0.75, 3.0], dtype=torch.float64),
        "ints": torch.tensor(3 * 2**40 + 3),
        "max": 0,
        "rows": torch.tensor([[1.1, 1.1], [2.1, 2.1], [2.1, 2.1]], dtype=torch.float64),
        "flags": torch.tensor([True, True, False]),
        "nothing": torch.zeros(0, 3),
        "columns": torch.cat([column, column + 10, column + 20]),
        "mean": 1 / 3,
        "empty mean": 0.0,
        "objects": [0, 1, 2],
        "first": 0,
    }
    for rank, found in enumerate(run_on_ranks(3, reduce_over_ranks)):
        own = {"share": list(range(rank, 7, 3)), "place": (rank, 3)}
        torch.testing.assert_close(found, expected | own, rtol=0, atol=0)


def fail_on_first_rank() -> str:
    with pytest.raises(OSError) as error:
        sharding.on_first_rank(lambda: (Path() / "nowhere").unlink())
    return error.value.strerror


def test_an_error_on_the_first_rank_is_raised_on_all() -> None:
    assert run_on_ranks(2, fail_on_first_rank) == ["No such file or directory"] * 2


def test_one_process_neither_communicates_nor_shards() -> None:
    model = build("tied")
    before = dict(model.named_parameters())
    with sharding.distributed(CPU, alone=False) as device:
        sharding.shard(model, torch.bfloat16, CPU)
        assert device == CPU and dict(model.named_parameters()) == before and not dist.is_initialized()
    assert (sharding.rank(), sharding.world_size(), sharding.max_over_ranks(7)) == (0, 1, 7)
    values = torch.tensor([1.0, 2.0])
    for each in (sharding.sum_over_ranks(values), sharding.gather_over_ranks(values)):
        assert torch.equal(each, values) and each.data_ptr() != values.data_ptr()
    with sharding.gathered(model):
        assert sharding.inside(model, lambda model, x: (model, x), 3) == (model, 3)
    assert sharding.on_first_rank(lambda: 5) == 5
    assert sharding.full_state_dict(model).keys() == model.state_dict().keys()


def head_left_exact() -> dict[str, Any]:
    """The score head's 0.37 and its gradient, under layers that compute in bfloat16."""
    model, seen = build("critic"), {}
    sharding.shard(model, torch.bfloat16, CPU, exact=model.score)
    with torch.no_grad():
        model.score.weight.zero_()
        model.score.bias.fill_(0.37)

    def body(model: PreTrainedModel, ids: Tensor) -> Tensor:
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state.flatten(0, 1)
        values = model.score(hidden.float())
        seen.update(hidden=hidden, values=values.detach().clone())
        return (257.0 * values).sum()

    sharding.inside(model, body, token_rows()).backward()
    seen.update(bias=sharding.whole(model.score.bias.grad), weight=sharding.whole(model.score.weight.grad))
    seen["meshes"] = {parameter.device_mesh.device_type for parameter in model.parameters()}
    return {name: each.detach() if isinstance(each, Tensor) else each for name, each in seen.items()}


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_exact_module_computes_in_float32(num_ranks: int) -> None:
    for seen in run_on_ranks(num_ranks, head_left_exact):
        assert seen["hidden"].dtype == torch.bfloat16
        assert torch.equal(seen["values"], torch.full((ROWS * WIDTH, 1), 0.37))
        # No bfloat16 has 257 or their sums.
        assert seen["bias"].tolist() == [num_ranks * 257.0 * ROWS * WIDTH]
        exact = num_ranks * 257.0 * seen["hidden"].double().sum(0)
        torch.testing.assert_close(seen["weight"][0].double(), exact, rtol=1e-6, atol=1e-3)


def test_shards_lie_on_the_device_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    # As on a machine with a GPU, which FSDP2 would take by itself.
    monkeypatch.setattr(torch._C, "_get_accelerator", lambda *_: torch.device("cuda"))
    model = build("tied")
    with sharding.distributed(CPU, alone=True), sharding.distributed(CPU, alone=True):
        sharding.shard(model, torch.bfloat16, CPU)
        assert {parameter.device_mesh.device_type for parameter in model.parameters()} == {"cpu"}
    assert not dist.is_initialized()


def test_rejects_bad_input() -> None:
    with (
        sharding.distributed(CPU, alone=True),
        pytest.raises(ValueError, match=r"parameters that train must be float32 to be sharded; got torch\.bfloat16"),
    ):
        sharding.shard(build("tied").bfloat16(), torch.bfloat16, CPU)
    with pytest.raises(ValueError, match="shard_ranks must divide the number of ranks, 1; got 2"):
        sharding.device_mesh(CPU, 2)
