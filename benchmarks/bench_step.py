"""Where the time of a training step goes: the stages, and each op of ours inside them.

    python -m benchmarks.bench_step

Runs steps of the embedded job with an untrained policy and times the calls of the ops. By Amdahl's law a step gains at
most the share of an op, however fast it becomes.
"""

import functools
import json
import sys
import time
from collections import Counter

import torch

STAGES = ("gen", "old_log_prob", "values", "adv", "update_actor", "update_critic")
OPS = {
    "vapo.learning.advantages": ("packed_gae", "masked_moments", "whiten_by", "value_moments"),
    "vapo.models.forward": ("linear_token_logprobs",),
    "vapo.learning.update": ("linear_policy_loss", "value_loss"),
}


def counted(op, seconds: Counter):
    """The op, its forward and the ops of its backward timed under its name."""

    @functools.wraps(op)
    def call(*args, **kwargs):
        began = time.perf_counter()
        out = op(*args, **kwargs)
        seconds[op.__name__] += time.perf_counter() - began
        return out

    return call


def time_ops(seconds: Counter) -> None:
    """Replace the ops that the trainer's modules imported by timed ones."""
    import importlib

    for module_name, names in OPS.items():
        module = importlib.import_module(module_name)
        for name in names:
            setattr(module, name, counted(getattr(module, name), seconds))


def shares(steps: int) -> tuple[dict[str, float], dict[str, float], float]:
    """Seconds of each stage and of each op over some steps, and of the steps."""
    from vapo.learning.learner import make_learner
    from vapo.learning.step import vapo_step
    from vapo.presets import preset
    from vapo.tasks import load_task

    ops: Counter = Counter()
    time_ops(ops)
    config = preset("vapo")
    learner, stages, total = make_learner(config, load_task(config.task), torch.device("cpu")), Counter(), 0.0
    learner.begin("vapo", config)
    vapo_step(learner, 1, config)
    ops.clear()
    for step in range(2, steps + 2):
        metrics = vapo_step(learner, step, config).metrics
        total += metrics["timing_s/step"]
        stages.update({stage: metrics[f"timing_s/{stage}"] for stage in STAGES})
    return dict(stages), dict(ops), total


def markdown(stages: dict[str, float], ops: dict[str, float], total: float, steps: int) -> str:
    """Two tables: stages, ops."""
    lines = [f"| part of a step ({1000 * total / steps:.0f} ms) | ms | share | gain at most |", "|---|---|---|---|"]
    for kind, found in (("", stages), ("op: ", ops)):
        for name, seconds in sorted(found.items(), key=lambda item: -item[1]):
            share = seconds / total
            lines.append(f"| {kind}{name} | {1000 * seconds / steps:.2f} | {share:.1%} | {1 / (1 - share):.3f} × |")
    return "\n".join(lines)


def main() -> None:
    steps = 1 if "--smoke" in sys.argv else 5
    stages, ops, total = shares(steps)
    if "--json" in sys.argv:
        print(json.dumps({"stages": stages, "ops": ops, "total": total, "steps": steps}))
    else:
        print(markdown(stages, ops, total, steps))


if __name__ == "__main__":
    main()
