"""How many kernels a sweep over sizes and temperatures would compile, for ours and for the peers' Triton kernels.

    python -m benchmarks.variants

Every launch is recorded with the key that Triton compiles by; nothing is compiled and no GPU is needed. A new variant
costs a user a second or more in the middle of a run.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Callable

import torch

from benchmarks.compiled import recorded_launches

LENGTHS = (1, 2, 7, 16, 17, 64, 255, 256)
TEMPERATURES = (0.6, 0.7, 0.8, 0.9, 1.0)
COLUMNS = 1024


def tensors(length: int) -> dict:
    """Two responses of ``length`` tokens; the values do not matter."""
    size = (2, length)
    return {
        "logits": torch.zeros(2, length + 1, COLUMNS, dtype=torch.bfloat16, requires_grad=True),
        "ids": torch.zeros(size, dtype=torch.int64),
        "x": torch.zeros(size),
        "mask": torch.ones(size, dtype=torch.bool),
        "advantages": torch.zeros(2),
        "cu_seqlens": torch.tensor([0, length, 2 * length], dtype=torch.int32),
    }


def ours_logprobs(t: dict, temperature: float) -> None:
    from vapo_kernels import token_logprobs

    out = token_logprobs(t["logits"][:, :-1], t["ids"], temperature=temperature)
    out.logprobs.sum().backward()


def ours_loss(t: dict, temperature: float) -> None:
    from vapo_kernels import policy_loss

    policy_loss(t["logits"][:, :-1], t["ids"], t["x"], t["x"], t["mask"], temperature=temperature).loss.backward()


def ours_gae(t: dict, temperature: float) -> None:
    from vapo_kernels import packed_gae

    # The temperature's numbers serve as λ.
    packed_gae(t["x"].flatten(), t["x"].flatten(), t["cu_seqlens"], lam_policy=temperature)


def trl_logprobs(t: dict, temperature: float) -> None:
    from trl.kernels.logprob_entropy import selective_log_softmax_and_entropy

    logprobs, _ = selective_log_softmax_and_entropy(t["logits"][:, :-1], t["ids"], temperature)
    logprobs.sum().backward()


def liger_loss(t: dict, temperature: float) -> None:
    from liger_kernel.transformers.grpo_loss import triton_grpo_loss

    loss, *_ = triton_grpo_loss(
        t["logits"], t["x"], None, t["ids"], t["advantages"], t["mask"],
        temperature=temperature, beta=0.0, inplace=False, loss_type="dapo", reduce=True,
    )  # fmt: skip
    loss.backward()


CALLS = {
    "ours, token_logprobs": ours_logprobs,
    "TRL selective_log_softmax_and_entropy": trl_logprobs,
    "ours, policy_loss": ours_loss,
    "Liger triton_grpo_loss": liger_loss,
    "ours, packed_gae": ours_gae,
}


def variants(call: Callable[[dict, float], None], pairs) -> int:
    """Distinct kernels over (length, temperature) pairs, forward and backward."""
    keys = defaultdict(set)
    for length, temperature in pairs:
        with recorded_launches("sm_90") as launches:
            call(tensors(length), temperature)
        for launch in launches:
            keys[launch.name].add(launch.key)
    return sum(len(found) for found in keys.values())


def measured() -> list[dict]:
    """One row a call: variants of one size, over the lengths, over the temperatures."""
    rows = []
    for name, call in CALLS.items():
        try:
            sweeps = {
                "one": [(64, 1.0)],
                "lengths": [(length, 1.0) for length in LENGTHS],
                "temperatures": [(64, temperature) for temperature in TEMPERATURES],
            }
            rows.append({"implementation": name} | {sweep: variants(call, pairs) for sweep, pairs in sweeps.items()})
        except Exception as broken:
            rows.append({"implementation": name, "failure": f"{type(broken).__name__}: {str(broken)[:120]}"})
    return rows


def markdown(rows: list[dict]) -> str:
    """The table of `main`."""
    lines = [
        f"| implementation | one size | {len(LENGTHS)} lengths | {len(TEMPERATURES)} temperatures (or λ) |",
        "|---|---|---|---|",
    ]
    for row in rows:
        cells = (
            [row["failure"], "", ""] if "failure" in row else [str(row[n]) for n in ("one", "lengths", "temperatures")]
        )
        lines.append(f"| {row['implementation']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    found = measured()
    print(json.dumps(found) if "--json" in sys.argv else markdown(found))
