"""The policy loss from logits, beside eager PyTorch, torch.compile and the peers' kernels."""

import torch
from torch import Tensor

from benchmarks.harness import Bench, Shape, sketch
from benchmarks.token_inputs import (
    CLIP_HIGH,
    CLIP_LOW,
    arguments,
    clipped_loss,
    need_triton,
    plain_logprobs,
    token_inputs,
    true_pieces,
)

VOCABULARIES = {"32k": 32_768, "128k": 128_256, "152k": 151_936, "262k": 262_144}


def logits_shapes(device: str, smoke: bool) -> list[Shape]:
    """The most telling ones first, in case the time runs out."""

    def shape(b: int, t: int, V: int, dtype: str) -> Shape:
        return Shape(f"N = {b * t:,}, V = {V:,}", {"B": b, "T": t, "V": V}, dtype)

    if smoke:
        return [shape(2, 4, 257, "float32"), shape(2, 4, 257, "bfloat16")]
    if device == "cpu":
        return [shape(8, 256, VOCABULARIES[name], "float32") for name in ("32k", "152k")]
    names = ("152k", "32k", "128k", "262k")
    return [shape(16, 256, VOCABULARIES[name], dtype) for dtype in ("bfloat16", "float32") for name in names]


def make_logits(shape: Shape, device: str) -> dict:
    """Logits [B, T, V] of spread 2, a leaf."""
    draw = torch.Generator(device).manual_seed(0)
    size, dtype = (shape["B"], shape["T"], shape["V"]), getattr(torch, shape.dtype)
    return {"logits": torch.randn(size, generator=draw, device=device, dtype=dtype).mul_(2).requires_grad_()}


def make_inputs(shape: Shape, device: str) -> dict:
    """Logits [B, T, V] and everything per token."""
    inputs = make_logits(shape, device)
    rows = inputs["logits"].detach().flatten(0, 1)
    return inputs | token_inputs(shape["B"], shape["T"], shape["V"], device, lambda at: rows[at])


def truth(inputs: dict) -> dict[str, Tensor]:
    """Loss and gradient in float64, without and with the NLL."""
    rows, found = inputs["logits"].detach().flatten(0, 1), {}
    for prefix in ("", "nll_"):
        pieces = [(p.loss, sketch(p.dlogits)) for p in true_pieces(inputs, lambda at: rows[at], nll=prefix == "nll_")]
        losses, dlogits = zip(*pieces, strict=True)
        found |= {f"{prefix}loss": sum(losses), f"{prefix}dlogits": torch.cat(dlogits)}
    return found


def load_ours():
    from vapo_kernels import policy_loss

    return lambda inputs: {"loss": policy_loss(inputs["logits"], *arguments(inputs)).loss}


def load_with_nll():
    from vapo_kernels import policy_loss

    return lambda inputs: {
        "nll_loss": policy_loss(inputs["logits"], *arguments(inputs), is_correct=inputs["is_correct"]).loss
    }


def load_reference():
    from vapo_kernels import reference

    return lambda inputs: {"loss": reference.policy_loss(inputs["logits"], *arguments(inputs)).loss}


def load_compiled():
    from vapo_kernels import reference

    compiled = torch.compile(lambda logits, *tokens: reference.policy_loss(logits, *tokens).loss)
    return lambda inputs: {"loss": compiled(inputs["logits"], *arguments(inputs))}


def load_lean():
    return lambda inputs: {"loss": clipped_loss(plain_logprobs(inputs["logits"], inputs["token_ids"]), inputs)}


def load_lean_compiled():
    compiled = torch.compile(lambda logits, inputs: clipped_loss(plain_logprobs(logits, inputs["token_ids"]), inputs))
    names = ("token_ids", "old_logprobs", "advantages", "mask")
    return lambda inputs: {"loss": compiled(inputs["logits"], {name: inputs[name] for name in names})}


def load_trl():
    from trl.trainer.utils import selective_log_softmax

    return lambda inputs: {"loss": clipped_loss(selective_log_softmax(inputs["logits"], inputs["token_ids"]), inputs)}


def load_liger():
    from liger_kernel.transformers.grpo_loss import triton_grpo_loss

    def run(inputs):
        need_triton(inputs["logits"])
        return {"loss": liger_loss(triton_grpo_loss, inputs)}

    return run


def liger_loss(triton_grpo_loss, inputs: dict) -> Tensor:
    """Liger's loss of the same numbers; the last position of its logits predicts nothing."""
    ids, old, _, mask = (x[:, :-1].contiguous() for x in arguments(inputs))
    return triton_grpo_loss(
        inputs["logits"], old, None, ids, inputs["response_advantages"], mask,
        temperature=1.0, beta=0.0, eps_low=CLIP_LOW, eps_high=CLIP_HIGH, inplace=False, loss_type="dapo", reduce=True,
    )[0]  # fmt: skip


def bytes_moved(shape: Shape, mode: str) -> int:
    """Logits read twice and written once, whatever part does it."""
    passes = {"forward": 3, "backward": 0, "both": 3}[mode]
    return passes * shape["B"] * shape["T"] * shape["V"] * getattr(torch, shape.dtype).itemsize


BENCH = Bench(
    name="policy_loss",
    title="Policy loss from logits",
    shapes=logits_shapes,
    make_inputs=make_inputs,
    truth=truth,
    providers={
        "ours": load_ours,
        "ours, with the positive NLL": load_with_nll,
        "reference (eager)": load_reference,
        "reference, torch.compile": load_compiled,
        "eager, log-probs only": load_lean,
        "eager, log-probs only, torch.compile": load_lean_compiled,
        "TRL selective_log_softmax, eager clip": load_trl,
        "Liger triton_grpo_loss": load_liger,
    },
    wrt=("logits",),
    modes={"cpu": ("both",), "cuda": ("forward", "backward", "both")},
    bytes_moved=bytes_moved,
    note=(
        "The loss that all of them have: clipped surrogate, one advantage a response, token mean, no NLL; the row"
        " with it computes more than the others. Ours and the reference also give entropy, KL and clip fraction; the"
        " rows called log-probs only, TRL's and Liger's do not give the entropy. Ours forms the gradient in forward, so"
        " its backward is almost nothing: compare `both`. GB/s counts 2 reads and 1 write of the logits."
    ),
)
