"""Bytes and launches of each op and of its peers, counted without a GPU, against the bound of the op.

    TRITON_INTERPRET=1 python -m benchmarks.traffic

Triton's interpreter runs the kernels and every load and store is counted; of the PyTorch ops around them (and of eager
PyTorch) the sizes of operands and results are. Neither knows a cache: a byte that is read twice counts twice. Every row
is sampled; a masked one is not read.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks import bench_gae, bench_policy_loss, bench_token_logprobs
from benchmarks.harness import ROOT, Shape

# Large enough that what is read once a row does not matter, small enough to interpret.
ROWS, COLUMNS = (2, 4), 32_768
SEQUENCES, SLOTS = 4, 4096


@dataclass
class Traffic:
    """What one implementation moved, in units of the logits (or bytes a token for GAE)."""

    op: str
    provider: str
    reads: float
    writes: float
    torch_bytes: float
    triton_launches: int
    torch_launches: int
    bound: str
    failure: str = ""


class TorchTraffic(TorchDispatchMode):
    """Bytes of operands and results of PyTorch ops that compute; views, allocations and custom ops count nothing."""

    IDLE = ("view", "empty", "detach", "alias", "expand", "slice", "select", "unsqueeze", "squeeze", "t.", "transpose",
            "as_strided", "unbind", "permute", "_to_copy", "_local_scalar", "split", "lift_fresh", "set_")  # fmt: skip

    def __init__(self):
        super().__init__()
        self.bytes = self.launches = 0
        self.paused = False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        namespace, _, name = str(function).partition(".")
        if not self.paused and namespace == "aten" and not name.startswith(self.IDLE):
            self.launches += 1
            tensors = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, torch.Tensor)]
            self.bytes += sum(_memory(x) for x in tensors)
        return result


def _memory(x: torch.Tensor) -> int:
    """Bytes behind a tensor; an expanded dimension lies there once."""
    elements = 1
    for length, stride in zip(x.shape, x.stride(), strict=True):
        elements *= length if stride else 1
    return elements * x.element_size()


def count(call: Callable[[], object], partial: tuple[str, ...] = ()):
    """(what the kernels did, what PyTorch did) in a call."""
    from triton.runtime import interpreter

    sys.path.append(str(ROOT / "tests"))
    from watcher import watch

    with watch(partial=partial) as seen, TorchTraffic() as around:
        launch = interpreter.GridExecutor.__call__

        def uncounted(self, *args, **kwargs):
            # The interpreter copies its arguments; hardware does not.
            around.paused = True
            launch(self, *args, **kwargs)
            around.paused = False

        interpreter.GridExecutor.__call__ = uncounted
        try:
            call()
        finally:
            interpreter.GridExecutor.__call__ = launch
    return seen, around


def logits_calls(dtype: str) -> list[tuple[str, str, str, Callable, tuple[str, ...]]]:
    """(op, provider, bound, call, arguments that a launch fills in part) for the ops from logits."""
    shape = Shape("", {"B": ROWS[0], "T": ROWS[1], "V": COLUMNS}, dtype)
    rows, tokens = bench_token_logprobs.make_inputs(shape, "cpu"), bench_policy_loss.make_inputs(shape, "cpu")
    # Liger wants one position more than it looks at.
    longer = bench_policy_loss.make_inputs(Shape("", shape.sizes | {"T": ROWS[1] + 1}, dtype), "cpu")
    for inputs in (tokens, longer):
        inputs["mask"] = torch.ones_like(inputs["mask"])

    def loss(load, inputs):
        (found,) = load()(inputs).values()
        torch.autograd.grad(found, inputs["logits"])

    def logprobs(load, *, grad: bool):
        out = load()(rows)
        if grad:
            torch.autograd.grad(out["logprobs"], rows["logits"], rows["upstream"]["logprobs"])

    def trl():
        from trl.kernels.logprob_entropy import selective_log_softmax_and_entropy as op

        return lambda inputs: dict(zip(("logprobs", "entropy"), op(inputs["logits"], inputs["token_ids"]), strict=True))

    def trl_loss():
        from benchmarks.token_inputs import clipped_loss

        return lambda inputs: {"loss": clipped_loss(trl()(inputs)["logprobs"], inputs)}

    def liger():
        from liger_kernel.transformers.grpo_loss import triton_grpo_loss

        return lambda inputs: {"loss": bench_policy_loss.liger_loss(triton_grpo_loss, inputs)}

    def inplace():
        from vapo_kernels import policy_loss

        # A leaf cannot be overwritten; the product stands for the model's last layer.
        return lambda inputs: {
            "loss": policy_loss(inputs["logits"] * 1, *bench_policy_loss.arguments(inputs), inplace=True).loss
        }

    def forward(name, load):
        return ("token_logprobs, forward", name, "1 read", lambda: logprobs(load, grad=False), ())

    def both(name, load):
        return ("token_logprobs, both", name, "2 reads, 1 write", lambda: logprobs(load, grad=True), ())

    def policy(name, load, inputs=tokens, partial=()):
        return ("policy_loss, both", name, "2 reads, 1 write", lambda: loss(load, inputs), partial)

    plain, reference = bench_token_logprobs, bench_policy_loss
    return [
        forward("ours", plain.load_ours),
        forward("TRL selective_log_softmax_and_entropy", trl),
        forward("reference (eager)", plain.load_reference),
        both("ours", plain.load_ours),
        both("TRL selective_log_softmax_and_entropy", trl),
        both("reference (eager)", plain.load_reference),
        policy("ours", reference.load_ours),
        policy("ours, with the positive NLL", reference.load_with_nll),
        policy("ours, in place (behind a product that costs 1 + 1)", inplace),
        policy("TRL selective_log_softmax_and_entropy, eager clip", trl_loss),
        policy("Liger triton_grpo_loss", liger, longer, ("DLOGITS",)),
        policy("eager, log-probs only", reference.load_lean),
        policy("reference (eager)", reference.load_reference),
    ]


def gae_calls() -> list[tuple[str, str, str, Callable, tuple[str, ...]]]:
    """The same for GAE, where no peer has a kernel."""
    from vapo_kernels import packed_gae

    inputs = bench_gae.make_inputs(Shape("", {"S": SEQUENCES, "T": SLOTS, "mixed": False}), "cpu")
    packed = (inputs["packed_rewards"], inputs["packed_values"], inputs["cu_seqlens"])
    mask = torch.ones(len(packed[0]), dtype=torch.bool)

    def padded():
        return bench_gae.column_loop(inputs["rewards"], inputs["values"], inputs["mask"], 0.95)

    return [
        ("GAE", "ours, packed, two λ", "16 B", lambda: packed_gae(*packed), ()),
        ("GAE", "ours, packed, two λ, with a mask", "17 B", lambda: packed_gae(*packed, mask=mask), ()),
        ("GAE", "ours, padded", "16 B", lambda: bench_gae.load_padded()(inputs), ()),
        ("GAE", "verl", "16 B", lambda: bench_gae.load_verl()(inputs), ()),
        ("GAE", "reference (column loop)", "16 B", padded, ()),
    ]


def measured(calls, unit: int) -> list[Traffic]:
    """Count each call in a unit of bytes; what cannot run says why."""
    found = []
    for op, provider, bound, call, partial in calls:
        try:
            seen, around = count(call, partial)
        except Exception as broken:
            failure = f"{type(broken).__name__}: {' '.join(str(broken).split())[:120]}"
            found.append(Traffic(op, provider, 0, 0, 0, 0, 0, bound, failure))
            continue
        read, written = seen.bytes_read.total() / unit, seen.bytes_written.total() / unit
        launches = len(seen.launches)
        found.append(Traffic(op, provider, read, written, around.bytes / unit, launches, around.launches, bound))
    return found


def markdown(rows: list[Traffic]) -> str:
    """The table of `main`."""
    titles = (
        "op",
        "implementation",
        "kernels read",
        "kernels write",
        "around, in PyTorch",
        "launches: Triton",
        "PyTorch",
    )
    lines = [f"| {' | '.join(titles)} | bound |", "|---" * 8 + "|"]
    for row in rows:
        numbers = (
            f"{row.reads:.3f}",
            f"{row.writes:.3f}",
            f"{row.torch_bytes:.3f}",
            row.triton_launches,
            row.torch_launches,
        )
        cells = [row.failure, "", "", "", ""] if row.failure else [str(number) for number in numbers]
        lines.append(f"| {row.op} | {row.provider} | {' | '.join(cells)} | {row.bound} |")
    return "\n".join(lines)


def main() -> None:
    rows = []
    for dtype in ("bfloat16", "float32"):
        unit = ROWS[0] * ROWS[1] * COLUMNS * getattr(torch, dtype).itemsize
        calls = [(f"{op}, {dtype}", *rest) for op, *rest in logits_calls(dtype)]
        rows += measured(calls, unit)
    lengths = bench_gae.make_inputs(Shape("", {"S": SEQUENCES, "T": SLOTS, "mixed": False}), "cpu")["cu_seqlens"]
    rows += measured(gae_calls(), int(lengths[-1]))
    print(json.dumps([asdict(row) for row in rows]) if "--json" in sys.argv else markdown(rows))


if __name__ == "__main__":
    main()
