"""Random inputs for the ops, and the way every test runs an op beside its reference."""

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# (leading shape, V) with blocks of 64 columns.
ROW_SHAPES = [
    ((1,), 1),  # one token, one column: every probability is 1
    ((3,), 7),  # less than a block, no power of two
    ((4,), 64),  # exactly one block
    ((2, 2), 65),  # one column more than a block; two leading dimensions
    ((5,), 257),  # several blocks and a tail of one column
    ((), 9),  # a single distribution without a leading dimension
]


def policy_inputs(shape, V: int, *, dtype=torch.float32, device="cpu", seed: int = 0, logits=None) -> dict:
    """Arguments of `policy_loss` whose ratios fall on both sides of both clips; about a quarter is masked."""
    draw = torch.Generator().manual_seed(seed)
    logits = (2 * torch.randn(*shape, V, generator=draw)).to(dtype) if logits is None else logits
    token_ids = torch.randint(V, shape, generator=draw)
    log_p = torch.log_softmax(logits.float(), -1)
    logprobs = log_p.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
    noise = {name: torch.randn(shape, generator=draw) for name in ("old", "advantages", "weights", "ref")}
    mask = torch.rand(shape, generator=draw) < 0.75
    mask.view(-1)[:1] = True
    return on(
        device,
        logits=logits,
        token_ids=token_ids,
        old_logprobs=logprobs + 0.4 * noise["old"],
        advantages=noise["advantages"],
        mask=mask,
        is_correct=torch.rand(shape, generator=draw) < 0.6,
        token_weights=1 + 0.3 * noise["weights"],
        ref_logprobs=logprobs + 0.7 * noise["ref"],
    )


def linear_inputs(shape, H: int, V: int, *, dtype=torch.float32, device="cpu", seed: int = 0) -> dict:
    """Arguments of `linear_policy_loss`: those of `policy_loss` with a head in the place of its logits."""
    draw = torch.Generator().manual_seed(seed + 100)
    head = {
        "hidden": torch.randn(*shape, H, generator=draw),
        "weight": torch.randn(V, H, generator=draw),
        "bias": torch.randn(V, generator=draw),
    }
    head = {name: x.to(dtype) for name, x in head.items()}
    logits = torch.nn.functional.linear(*(x.float() for x in head.values()))
    inputs = policy_inputs(shape, V, seed=seed, logits=logits)
    del inputs["logits"]
    return on(device, **head, **inputs)


def packed_inputs(lengths, *, dtype=torch.float32, device="cpu", seed: int = 0, slack: int = 0) -> dict:
    """Arguments of `packed_gae`: dense rewards, a quarter of the tokens masked, bootstraps."""
    draw = torch.Generator().manual_seed(seed)
    num_tokens = sum(lengths) + slack
    return on(
        device,
        rewards=torch.randn(num_tokens, generator=draw).to(dtype),
        values=torch.randn(num_tokens, generator=draw).to(dtype),
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0),
        mask=torch.rand(num_tokens, generator=draw) < 0.75,
        bootstrap_values=torch.randn(len(lengths), generator=draw).to(dtype),
    )


def value_inputs(shape, *, dtype=torch.float32, device="cpu", seed: int = 0) -> dict:
    """Arguments of `value_loss`; old values on both sides of a clip of 0.2."""
    draw = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=draw)
    mask = torch.rand(shape, generator=draw) < 0.75
    mask.view(-1)[:1] = True
    return on(
        device,
        values=values.to(dtype),
        returns=torch.randn(shape, generator=draw).to(dtype),
        mask=mask,
        old_values=(values + 0.3 * torch.randn(shape, generator=draw)).to(dtype),
    )


def on(device, **inputs) -> dict:
    """The same arguments with every tensor on a device."""
    return {name: x.to(device) if isinstance(x, Tensor) else x for name, x in inputs.items()}


def cast(inputs: dict, dtype: torch.dtype) -> dict:
    """The same arguments on the CPU, floating tensors in a dtype: what a reference is given."""
    return {
        name: (x.detach().cpu().to(dtype) if x.is_floating_point() else x.cpu()) if isinstance(x, Tensor) else x
        for name, x in inputs.items()
    }


def split(inputs: dict, sizes: list[int]) -> list[dict]:
    """The arguments of each micro-batch: tensors are cut along their first dimension, the rest is the same for all."""
    cut = {name: x.split(sizes) for name, x in inputs.items() if isinstance(x, Tensor) and x.dim() > 0}
    return [{**inputs, **{name: parts[i] for name, parts in cut.items()}} for i in range(len(sizes))]


def run(op, inputs: dict, wrt: str | list[str], *, upstream: float = 1.0):
    """The result of a loss op, and the gradients of ``upstream·loss`` to the named arguments."""
    names = [wrt] if isinstance(wrt, str) else wrt
    leaves = {name: inputs[name].detach().clone().requires_grad_() for name in names}
    out = op(**{**inputs, **leaves})
    grads = torch.autograd.grad(out.loss, list(leaves.values()), torch.full_like(out.loss, upstream))
    return out, dict(zip(names, grads, strict=True))


def references(op, inputs: dict, wrt, *, upstream: float = 1.0):
    """((result, gradients) in float64, the same in float32): the truth and the baseline."""
    names = [wrt] if isinstance(wrt, str) else wrt
    exact, exact_grads = run(op, cast(inputs, torch.float64), names, upstream=upstream)
    baseline, baseline_grads = run(op, cast(inputs, torch.float32), names, upstream=upstream)
    return (exact, exact_grads), (baseline, baseline_grads)
