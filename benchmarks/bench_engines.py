"""Tokens per second of each sampling engine on the same prompts and weights, in one run.

    python -m benchmarks.bench_engines --model tiny --model .smoke/smollm2      with vLLM: make bench-engines

An engine gets one round to warm up, then the median of ``--rounds`` counts. Its log-probs are compared with the
trainer's own first; an engine that is not installed stands in the table as such.
"""

import argparse
import datetime
import random
import statistics
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec

import torch

from benchmarks import device, tables
from vapo.config import Config
from vapo.models.forward import rollout_logprobs
from vapo.models.load import load_policy, plain_head, stop_token_ids
from vapo.models.sharding import distributed, shard
from vapo.rollout.collect import encode_prompts, pack
from vapo.rollout.sampling import ENGINES, Sampling, ready_to_sample, sample, with_engine
from vapo.tasks import Problem, load_task

COLUMNS = ("model", "engine", "prompts × responses × tokens", "tokens", "tokens/s", "tokens/CPU s", "mean |Δ log-prob|")
CPU = torch.device("cpu")


def measure(model: str, engine: str, shape: tuple[int, int, int], rounds: int) -> list[str]:
    """One row of the table."""
    num_prompts, group_size, max_new_tokens = shape
    cells = [model, engine, " × ".join(map(str, shape))]
    if engine == "vllm" and not find_spec("vllm"):
        return [*cells, "vLLM is not installed", "", "", ""]
    config, task = Config(model=model, engine=engine, dtype="float32", attention="sdpa"), load_task("running-total")
    with distributed(CPU, alone=config.needs_group), ExitStack() as at_end:
        policy, tokenizer = load_policy(model, task, seed=0, attention="sdpa", gradient_checkpointing=False)
        plain_head(policy)
        shard(policy, torch.float32, CPU)
        stops = stop_token_ids(policy, tokenizer)
        sampling = with_engine(Sampling(max_new_tokens, stops, engine=engine), policy, config)
        at_end.callback(sampling.close)
        prompts = encode_prompts(tokenizer, problems(model, task, num_prompts))
        times, cpu_times, counts = [], [], []
        for seed in range(rounds + 1):
            began, cpu_began = time.perf_counter(), time.process_time()
            with ready_to_sample(policy, sampling):
                responses = sample(
                    policy,
                    prompts,
                    group_size=group_size,
                    sampling=sampling,
                    generator=torch.Generator().manual_seed(seed),
                )
            times.append(time.perf_counter() - began)
            cpu_times.append(time.process_time() - cpu_began)
            counts.append(sum(len(response.token_ids) for response in responses))
        gap = "not told"
        if responses[0].logprobs is not None:
            repeated = [prompt for prompt in prompts for _ in range(group_size)]
            nothing = torch.zeros(len(responses), dtype=torch.bool)
            ids = [response.token_ids for response in responses]
            rollout = pack(repeated, ids, nothing.float(), nothing, nothing, group_size, CPU)
            expected = rollout_logprobs(policy, rollout, replace(config, micro_batch_tokens=4096))
            gap = f"{(torch.cat([each.logprobs for each in responses]) - expected).abs().mean().item():.0e}"
    rates, cpu_rates = (
        [count / seconds for count, seconds in zip(counts[1:], each[1:], strict=True)] for each in (times, cpu_times)
    )
    rates = [f"{statistics.median(rates):,.0f}", f"{statistics.median(cpu_rates):,.0f}"]
    return [*cells, f"{statistics.median(counts[1:]):,.0f}", *rates, gap]


def problems(model: str, task, count: int) -> list[Problem]:
    """Prompts of the embedded task, or questions in the model's chat template."""
    if model == "tiny":
        return task.problems(count, random.Random(0))
    asked = [f"Explain in a few sentences why {n} times {n + 3} is {n * (n + 3)}." for n in range(count)]
    return [Problem([{"role": "user", "content": text}], "") for text in asked]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", action="append", required=True, help='"tiny" or a folder; may be given several times'
    )
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    environment = tables.environment("cpu", f"python -m benchmarks.bench_engines {' '.join(sys.argv[1:])}")
    lines = [f"- {name}: {value}" for name, value in environment.items()]
    lines += ["", "| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    print("\n".join(lines), flush=True)
    for model in arguments.model:
        shape = (32, 8, 110) if model == "tiny" else (16, 8, 128)
        for engine in ENGINES:
            lines.append("| " + " | ".join(measure(model, engine, shape, arguments.rounds)) + " |")
            print(lines[-1], flush=True)
    name = f"{tables.slug(device.name('cpu'))}_{datetime.date.today().isoformat()}_engines.md"
    text = "\n".join(["# Sampling engines", "", *lines, ""])
    (tables.RESULTS / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
