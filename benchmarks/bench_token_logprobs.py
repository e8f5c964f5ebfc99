"""Log-probs and entropies from logits, beside the peers' kernels."""

import torch
from torch import Tensor

from benchmarks.bench_policy_loss import logits_shapes, make_logits
from benchmarks.harness import Bench, Shape, sketch
from benchmarks.token_inputs import ROWS_OF_TRUTH, need_triton, plain_logprobs


def make_inputs(shape: Shape, device: str) -> dict:
    """Logits [B, T, V], ids, and upstream gradients of the log-probs."""
    inputs = make_logits(shape, device)
    draw = torch.Generator(device).manual_seed(1)
    size = (shape["B"], shape["T"])
    token_ids = torch.randint(shape["V"], size, generator=draw, device=device)
    return inputs | {
        "token_ids": token_ids,
        "upstream": {"logprobs": torch.randn(size, generator=draw, device=device)},
    }


def truth(inputs: dict) -> dict[str, Tensor]:
    """The reference in float64, some rows at a time."""
    from vapo_kernels import reference

    logits, token_ids = inputs["logits"].detach().flatten(0, 1), inputs["token_ids"].flatten()
    upstream, found = inputs["upstream"]["logprobs"].flatten().double(), []
    for rows, ids, weights in zip(*(x.split(ROWS_OF_TRUTH) for x in (logits, token_ids, upstream)), strict=True):
        exact = rows.double().requires_grad_()
        out = reference.token_logprobs(exact, ids)
        found.append(
            (out.logprobs.detach(), out.entropy.detach(), sketch(torch.autograd.grad(out.logprobs, exact, weights)[0]))
        )
    logprobs, entropy, dlogits = (torch.cat(pieces) for pieces in zip(*found, strict=True))
    shape = inputs["token_ids"].shape
    return {"logprobs": logprobs.view(shape), "entropy": entropy.view(shape), "dlogits": dlogits}


def load_reference():
    from vapo_kernels import reference

    return lambda inputs: reference.token_logprobs(inputs["logits"], inputs["token_ids"])._asdict()


def load_compiled():
    from vapo_kernels import reference

    compiled = torch.compile(lambda logits, ids: tuple(reference.token_logprobs(logits, ids)))
    return lambda inputs: dict(
        zip(("logprobs", "entropy"), compiled(inputs["logits"], inputs["token_ids"]), strict=True)
    )


def load_plain():
    return lambda inputs: {"logprobs": plain_logprobs(inputs["logits"], inputs["token_ids"])}


def load_ours():
    from vapo_kernels import token_logprobs

    return lambda inputs: token_logprobs(inputs["logits"], inputs["token_ids"])._asdict()


def load_trl():
    from trl.kernels.logprob_entropy import selective_log_softmax_and_entropy

    def run(inputs):
        need_triton(inputs["logits"])
        found = selective_log_softmax_and_entropy(inputs["logits"], inputs["token_ids"])
        return dict(zip(("logprobs", "entropy"), found, strict=True))

    return run


def load_flash():
    from flash_attn.ops.triton.cross_entropy import cross_entropy_loss

    def run(inputs):
        losses, _ = cross_entropy_loss(inputs["logits"].flatten(0, 1), inputs["token_ids"].flatten())
        return {"logprobs": -losses.view(inputs["token_ids"].shape)}

    return run


def bytes_moved(shape: Shape, mode: str) -> int:
    """Logits read once forward; read once and written once backward."""
    passes = {"forward": 1, "backward": 2, "both": 3}[mode]
    return passes * shape["B"] * shape["T"] * shape["V"] * getattr(torch, shape.dtype).itemsize


BENCH = Bench(
    name="token_logprobs",
    title="Log-probs and entropies from logits",
    shapes=logits_shapes,
    make_inputs=make_inputs,
    truth=truth,
    providers={
        "ours": load_ours,
        "reference (eager)": load_reference,
        "reference, torch.compile": load_compiled,
        "log_softmax and gather, no entropy": load_plain,
        "TRL selective_log_softmax_and_entropy": load_trl,
        "flash-attn cross entropy, no entropy": load_flash,
    },
    wrt=("logits",),
    modes={"cpu": ("forward",), "cuda": ("forward", "backward", "both")},
    bytes_moved=bytes_moved,
    note=(
        "On the CPU the forward pass alone, which is what old log-probs need. The gradient is that of the log-probs;"
        " entropies are computed and carry none, as in VAPO. GB/s counts the op's bound: logits read once forward, read"
        " once and written once backward."
    ),
)
