"""The policy loss from hidden states, beside eager PyTorch and the peers' chunked losses."""

import torch
from torch import Tensor
from torch.nn.functional import linear

from benchmarks.bench_policy_loss import VOCABULARIES
from benchmarks.harness import Bench, Shape, sketch
from benchmarks.token_inputs import (
    CLIP_HIGH,
    CLIP_LOW,
    arguments,
    clipped_loss,
    plain_logprobs,
    token_inputs,
    true_pieces,
)

# As trl.trainer.utils calls it.
TRL_CHUNK = 32_768


def shapes(device: str, smoke: bool) -> list[Shape]:
    """H of a 0.5B model on the CPU, of a 3B model on a GPU; the most telling vocabulary first."""

    def shape(b: int, t: int, V: int, H: int, dtype: str) -> Shape:
        return Shape(f"N = {b * t:,}, V = {V:,}, H = {H:,}", {"B": b, "T": t, "V": V, "H": H}, dtype)

    if smoke:
        return [shape(2, 4, 257, 16, "float32"), shape(2, 4, 257, 16, "bfloat16")]
    if device == "cpu":
        return [shape(8, 256, VOCABULARIES[name], 896, "float32") for name in ("32k", "152k")]
    names = ("152k", "32k", "128k", "262k")
    return [shape(16, 256, VOCABULARIES[name], 2048, dtype) for dtype in ("bfloat16", "float32") for name in names]


def make_inputs(shape: Shape, device: str) -> dict:
    """Hidden states [B, T, H] and a head [V, H], leaves, whose logits have spread 2; everything per token."""
    draw, dtype = torch.Generator(device).manual_seed(0), getattr(torch, shape.dtype)
    b, t, V, H = (shape[name] for name in "BTVH")
    hidden = torch.randn(b, t, H, generator=draw, device=device).to(dtype)
    weight = (torch.randn(V, H, generator=draw, device=device) * 2 / H**0.5).to(dtype)
    rows = hidden.flatten(0, 1)
    tokens = token_inputs(b, t, V, device, lambda at: linear(rows[at], weight))
    return {"hidden": hidden.requires_grad_(), "weight": weight.requires_grad_(), **tokens}


def truth(inputs: dict) -> dict[str, Tensor]:
    """Loss and gradients in float64; that of the head as its `sketch`."""
    hidden, weight = inputs["hidden"].detach().flatten(0, 1).double(), inputs["weight"].detach().double()
    # The sketch of dlogitsᵀ hidden is dlogitsᵀ (the sketch of hidden), which costs no product of matrices.
    direction, loss, dhidden, dweight = sketch(hidden), 0.0, [], torch.zeros_like(weight[:, 0])
    for piece in true_pieces(inputs, lambda at: hidden[at] @ weight.t()):
        loss = loss + piece.loss
        dhidden.append(piece.dlogits @ weight)
        dweight += piece.dlogits.t() @ direction[piece.at]
    return {"loss": loss, "dhidden": torch.cat(dhidden).view(inputs["hidden"].shape), "dweight": dweight}


def load_ours():
    from vapo_kernels import linear_policy_loss

    return lambda inputs: {"loss": linear_policy_loss(inputs["hidden"], inputs["weight"], *arguments(inputs)).loss}


def load_reference():
    from vapo_kernels import reference

    return lambda inputs: {
        "loss": reference.linear_policy_loss(inputs["hidden"], inputs["weight"], *arguments(inputs)).loss
    }


def load_compiled():
    from vapo_kernels import reference

    compiled = torch.compile(lambda *inputs: reference.linear_policy_loss(*inputs).loss)
    return lambda inputs: {"loss": compiled(inputs["hidden"], inputs["weight"], *arguments(inputs))}


def load_lean():
    def run(inputs):
        logits = linear(inputs["hidden"], inputs["weight"])
        return {"loss": clipped_loss(plain_logprobs(logits, inputs["token_ids"]), inputs)}

    return run


def load_trl():
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    def run(inputs):
        hidden, ids = inputs["hidden"].flatten(0, 1), inputs["token_ids"]
        logprobs, *_ = ChunkedLogProbFunction.apply(
            hidden, inputs["weight"], None, ids.flatten(), 1.0, TRL_CHUNK, None, 1.0, ("entropy",)
        )
        return {"loss": clipped_loss(logprobs.view(ids.shape), inputs)}

    return run


def load_liger():
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    loss = LigerFusedLinearGRPOLoss(
        beta=0.0, compiled=False, use_ref_model=False, epsilon_low=CLIP_LOW, epsilon_high=CLIP_HIGH, loss_type="dapo"
    )

    def run(inputs):
        ids, old, _, mask = arguments(inputs)
        found, _ = loss(
            inputs["hidden"], inputs["weight"], ids, mask, inputs["response_advantages"], old_per_token_logps=old
        )
        return {"loss": found}

    return run


def load_torch():
    try:
        from torch.nn import LinearCrossEntropyOptions
        from torch.nn.functional import linear_cross_entropy
    except ImportError as absent:
        raise ImportError(f"torch {torch.__version__} has no chunked linear_cross_entropy") from absent

    def run(inputs):
        hidden, ids = inputs["hidden"].flatten(0, 1), inputs["token_ids"]
        losses = linear_cross_entropy(
            hidden, inputs["weight"], ids.flatten(), reduction="none", options=LinearCrossEntropyOptions()
        )
        return {"loss": clipped_loss(-losses.view(ids.shape), inputs)}

    return run


def load_products():
    """The three products alone: what no implementation can be faster than."""

    def run(inputs):
        hidden, weight = inputs["hidden"].detach().flatten(0, 1), inputs["weight"].detach()
        logits = hidden @ weight.t()
        return {"dhidden_like": logits @ weight, "dweight_like": logits.t() @ hidden}

    return run


BENCH = Bench(
    name="linear_policy_loss",
    title="Policy loss from hidden states",
    shapes=shapes,
    make_inputs=make_inputs,
    truth=truth,
    providers={
        "ours": load_ours,
        "reference (eager)": load_reference,
        "reference, torch.compile": load_compiled,
        "eager, log-probs only": load_lean,
        "TRL ChunkedLogProbFunction, eager clip": load_trl,
        "Liger LigerFusedLinearGRPOLoss": load_liger,
        "torch linear_cross_entropy, eager clip": load_torch,
        "three matrix products (a bound)": load_products,
    },
    wrt=("hidden", "weight"),
    modes={"cpu": ("both",), "cuda": ("both",)},
    bytes_moved=lambda shape, mode: None,
    note=(
        "Peak memory is what the call added: the high-water mark less what lay there before (hidden states, head), so"
        " it holds the gradients handed back, 4·V·H bytes for the head in float32. The same loss as in the table from"
        " logits; only ours and the reference give the entropy's mean, KL and clip fraction, and TRL's the entropies."
    ),
)
