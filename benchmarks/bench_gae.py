"""GAE over padded and packed batches, beside the peers' own functions."""

import math

import torch
from torch import Tensor

from benchmarks.harness import Bench, Shape

LAM = 0.95
CHUNK = 128


def shapes(device: str, smoke: bool) -> list[Shape]:
    """(S, T, lengths): uniform in [0.1 T, T] fill about 55 %, mixed lengths are log-uniform."""
    if smoke:
        return [Shape("8 × 64, 55 % full", {"S": 8, "T": 64, "mixed": False})]
    if device == "cuda":
        one_million = [(1862, 1024, False, "short"), (233, 8192, False, "long"), (200, 32768, True, "mixed")]
        return [Shape(f"{s} × {t:,}, {kind}", {"S": s, "T": t, "mixed": mixed}) for s, t, mixed, kind in one_million]
    sizes = [(2048, False), (8192, False), (8192, True), (32768, False)]
    kinds = {False: "55 % full", True: "mixed lengths"}
    return [Shape(f"512 × {t:,}, {kinds[mixed]}", {"S": 512, "T": t, "mixed": mixed}) for t, mixed in sizes]


def make_inputs(shape: Shape, device: str) -> dict:
    """Rewards (the last token's), values and a prefix mask, padded [S, T] and packed [N]; padding holds zeros."""
    draw, s, t = torch.Generator(device).manual_seed(0), shape["S"], shape["T"]
    share = torch.rand(s, generator=draw, device=device)
    lengths = 64 * (t / 64) ** share if shape["mixed"] else t * (0.1 + 0.9 * share)
    lengths = lengths.long().clamp(1, t)
    mask = torch.arange(t, device=device) < lengths.unsqueeze(1)
    values = torch.randn(s, t, generator=draw, device=device) * mask
    rewards = torch.zeros(s, t, device=device)
    rewards[torch.arange(s, device=device), lengths - 1] = torch.rand(s, generator=draw, device=device)
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    packed = {"packed_rewards": rewards[mask], "packed_values": values[mask], "cu_seqlens": cu_seqlens}
    return {"rewards": rewards, "values": values, "mask": mask, "float_mask": mask.float(), **packed}


def truth(inputs: dict) -> dict[str, Tensor]:
    """Eq. 5 to 9 in float64, all λ in one loop over contiguous columns."""
    mask = inputs["mask"]
    rewards, values, sampled = (
        x.t().contiguous() for x in (inputs["rewards"].double(), inputs["values"].double(), mask)
    )
    adaptive = (1 - 20 / mask.sum(1).double()).clamp(min=0)
    lams = torch.stack([torch.full_like(adaptive, LAM), adaptive, torch.ones_like(adaptive)])
    found = torch.zeros(3, *rewards.shape, dtype=torch.float64, device=rewards.device)
    advantage, next_value = torch.zeros_like(lams), torch.zeros_like(values[0])
    for t in reversed(range(len(rewards))):
        advantage = torch.where(sampled[t], rewards[t] + next_value - values[t] + lams * advantage, advantage)
        next_value = torch.where(sampled[t], values[t], next_value)
        found[:, t] = advantage * sampled[t]
    advantages, adaptive, monte_carlo = found.transpose(1, 2)
    returns, monte_carlo = (x + inputs["values"].double() * mask for x in (advantages, monte_carlo))
    whitened = (advantages - advantages[mask].mean()) * torch.rsqrt(advantages[mask].var() + 1e-8) * mask
    packed = {"packed_advantages": advantages[mask], "packed_returns": returns[mask]}
    two = {"adaptive_advantages": adaptive[mask], "monte_carlo_returns": monte_carlo[mask]}
    return {"advantages": advantages, "returns": returns, "whitened": whitened, **packed, **two}


def column_loop(rewards: Tensor, values: Tensor, mask: Tensor, lam: float) -> tuple[Tensor, Tensor]:
    """Eq. 5, 8 as every trainer writes them: a Python loop over the columns of the padded batch."""
    advantage = next_value = torch.zeros_like(rewards[:, 0])
    columns = []
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + next_value - values[:, t]
        advantage = torch.where(mask[:, t], delta + lam * advantage, advantage)
        next_value = torch.where(mask[:, t], values[:, t], next_value)
        columns.append(advantage)
    advantages = torch.stack(columns[::-1], dim=1)
    return advantages, advantages + values


def chunked_scan(rewards: Tensor, values: Tensor, mask: Tensor, lam: float) -> tuple[Tensor, Tensor]:
    """A matrix product with powers of λ inside chunks of 128 columns, a carry between them: slime's algorithm."""
    s, t = rewards.shape
    next_values = torch.nn.functional.pad(values, (0, 1))[:, 1:]
    deltas = torch.nn.functional.pad((rewards + next_values - values) * mask, (0, -t % CHUNK)).view(s, -1, CHUNK)
    exponents = torch.arange(CHUNK, device=rewards.device)
    distance = exponents.unsqueeze(1) - exponents
    powers = torch.where(distance >= 0, lam ** distance.clamp(min=0).float(), 0.0)
    inside = deltas @ powers
    decay, carry, chunks = lam ** (CHUNK - exponents).float(), torch.zeros(s, 1, device=rewards.device), []
    for c in reversed(range(deltas.shape[1])):
        chunks.append(inside[:, c] + decay * carry)
        carry = chunks[-1][:, :1]
    advantages = torch.cat(chunks[::-1], dim=1)[:, :t]
    return advantages, advantages + values


def load_columns():
    def run(inputs):
        advantages, returns = column_loop(inputs["rewards"], inputs["values"], inputs["mask"], LAM)
        return {"advantages": advantages * inputs["mask"], "returns": returns * inputs["mask"]}

    return run


def load_chunks():
    def run(inputs):
        advantages, returns = chunked_scan(inputs["rewards"], inputs["values"], inputs["float_mask"], LAM)
        return {"advantages": advantages * inputs["mask"], "returns": returns * inputs["mask"]}

    return run


def load_verl():
    from verl.trainer.ppo.core_algos import compute_gae_advantage_return

    def run(inputs):
        whitened, returns = compute_gae_advantage_return(
            inputs["rewards"], inputs["values"], inputs["float_mask"], 1.0, LAM
        )
        return {"whitened": whitened * inputs["mask"], "returns": returns * inputs["mask"]}

    return run


def load_torchrl():
    from torchrl.objectives.value.functional import vec_generalized_advantage_estimate

    def run(inputs):
        mask, values = inputs["mask"], inputs["values"]
        next_values = torch.nn.functional.pad(values, (0, 1))[:, 1:]
        done = mask & ~torch.nn.functional.pad(mask, (0, 1))[:, 1:]
        done[:, -1] = True
        columns = (x.unsqueeze(-1) for x in (values, next_values, inputs["rewards"], done))
        advantages, returns = vec_generalized_advantage_estimate(1.0, LAM, *columns)
        return {"advantages": advantages.squeeze(-1) * mask, "returns": returns.squeeze(-1) * mask}

    return run


def load_padded():
    from vapo_kernels import padded_gae

    return lambda inputs: padded_gae(
        inputs["rewards"], inputs["values"], inputs["mask"], lam_policy=LAM, lam_critic=LAM
    )._asdict()


def load_whitened():
    from vapo_kernels import masked_whiten, padded_gae

    def run(inputs):
        mask = inputs["mask"]
        out = padded_gae(inputs["rewards"], inputs["values"], mask, lam_policy=LAM, lam_critic=LAM)
        return {"whitened": masked_whiten(out.advantages, mask), "returns": out.returns}

    return run


def load_packed():
    from vapo_kernels import packed_gae

    def run(inputs):
        packed = (inputs["packed_rewards"], inputs["packed_values"], inputs["cu_seqlens"])
        out = packed_gae(*packed, lam_policy=LAM, lam_critic=LAM)
        return {"packed_advantages": out.advantages, "packed_returns": out.returns}

    return run


def load_adaptive():
    from vapo_kernels import packed_gae

    def run(inputs):
        out = packed_gae(inputs["packed_rewards"], inputs["packed_values"], inputs["cu_seqlens"])
        return {"adaptive_advantages": out.advantages, "monte_carlo_returns": out.returns}

    return run


def bytes_moved(shape: Shape, mode: str) -> int:
    """16 B a sampled token: reward and value read, advantage and return written."""
    mean = (shape["T"] - 64) / math.log(shape["T"] / 64) if shape["mixed"] else 0.55 * shape["T"]
    return int(16 * shape["S"] * mean)


BENCH = Bench(
    name="gae",
    title="GAE, λ = 0.95 and γ = 1 for advantages and returns",
    shapes=shapes,
    make_inputs=make_inputs,
    truth=truth,
    providers={
        "ours, padded": load_padded,
        "reference (eager)": load_columns,
        "verl": load_verl,
        "ours, padded, then whitened (verl's work)": load_whitened,
        "ours, packed": load_packed,
        "ours, packed, VAPO's two λ": load_adaptive,
        "chunked matmul scan (as slime, own code)": load_chunks,
        "torchrl, vectorised": load_torchrl,
    },
    wrt=(),
    modes={"cpu": ("forward",), "cuda": ("forward",)},
    bytes_moved=bytes_moved,
    note=(
        "The reference is the column loop over the padded batch: torch.compile would unroll its thousands of steps, so"
        " there is no compiled row. verl whitens in the same function. torchrl cuts λᵗ off below 1e-7, which λ = 1"
        " never reaches. Only the row of two λ computes what VAPO asks for: λ_critic = 1 for the returns, Eq. 15 for"
        " each sequence. GB/s counts 16 B a sampled token; padded rows also write padding."
    ),
)
