"""Our trainer beside TRL's: GRPO with the same model, rows, reward and sizes, each in a process of its own.

    python -m benchmarks.bench_trainer --model .smoke/smollm2

Prints tokens per second, the time of each stage and the peak of memory: of TRL's `GRPOTrainer`, and of ours with each
engine. An engine may run in an environment of its own: ``--python vllm=.venv-vllm/bin/python``.
"""

import argparse
import contextlib
import datetime
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import get_args

import torch

from benchmarks import device, tables, trainer_rows
from benchmarks.bench_step import counted
from benchmarks.harness import LEFT_OUT, ROOT

TRL = "TRL GRPOTrainer"
STAGES = ("sampling", "verification", "old log-probs", "reference", "update", "other")
WARM_UP = 1
LR, WEIGHT_DECAY, SEED = 1e-6, 0.01, 0
NOTE = (
    "The model `{model}`, GRPO without KL term: {num_prompts} prompts × {group_size} responses of at most"
    " {max_new_tokens} tokens at T = 1, one optimiser step on all of them, float32, {threads} threads; means over"
    " {steps} steps after a warm-up. Tokens are sampled ones. TRL's sampling is transformers' `generate`, and its old"
    " log-probs come from the update's own forward pass. Peak is the resident high-water mark of the whole process."
)


@dataclass(frozen=True)
class Sizes:
    """What both trainers run with; ``model`` is a folder, ``steps`` are those timed after the warm-up."""

    model: str
    num_prompts: int = 8
    group_size: int = 4
    max_new_tokens: int = 64
    steps: int = 2
    threads: int = 2

    @property
    def num_responses(self) -> int:
        return self.num_prompts * self.group_size


@dataclass
class Row:
    """What a trainer took for a step, in seconds, or why there is no time.

    Attributes:
        trainer: Its name.
        step: Wall time.
        cpu: Time of all cores.
        stages: Parts of ``step`` by the names in ``STAGES``; the last one is what the others leave.
        tokens: Sampled tokens.
        reward: Mean reward, which says that both did the same.
        peak_bytes: Of the whole process.
        versions: Of the packages that it ran with.
        failure: Why nothing was measured.
    """

    trainer: str
    step: float = 0.0
    cpu: float = 0.0
    stages: dict[str, float] = field(default_factory=dict)
    tokens: float = 0.0
    reward: float = 0.0
    peak_bytes: int | None = None
    versions: str = ""
    failure: str = ""


def trainers() -> list[str]:
    """TRL's, and ours with each engine that Config names."""
    from vapo.config import Engine

    return [TRL, *(f"ours, {engine}" for engine in get_args(Engine) if engine != "auto")]


def measure(trainer: str, sizes: Sizes, folder: Path) -> Row:
    """Train in this process.

    Raises:
        ImportError: If the trainer or its engine is not installed.
    """
    torch.set_num_threads(sizes.threads)
    rows = folder / "rows.jsonl"
    trainer_rows.write_rows(rows)
    row = _trl(sizes, rows, folder) if trainer == TRL else _ours(trainer.removeprefix("ours, "), sizes, rows)
    row.stages["other"] = row.step - sum(row.stages.values())
    row.peak_bytes, row.versions = _peak_bytes(), device.versions()
    return row


def _ours(engine: str, sizes: Sizes, rows: Path) -> Row:
    """The preset ``grpo``; an engine other than the loop has the name of the package that it needs."""
    if engine != "loop" and not importlib.util.find_spec(engine):
        raise ImportError(f"No module named {engine!r}")
    from vapo.presets import preset

    config = preset(
        "grpo",
        task=str(rows),
        reward=f"{trainer_rows.__file__}:last_number",
        model=sizes.model,
        engine=engine,
        device="cpu",
        dtype="float32",
        attention="sdpa",
        threads=sizes.threads,
        seed=SEED,
        kl_weight=0.0,
        num_prompts=sizes.num_prompts,
        group_size=sizes.group_size,
        max_new_tokens=sizes.max_new_tokens,
        steps=WARM_UP + sizes.steps,
        mini_batches=1,
        actor_lr=LR,
        weight_decay=WEIGHT_DECAY,
    )
    mean = _our_steps(config, sizes)
    stages = {
        "sampling": mean["timing_s/gen"] - mean["verify"],
        "verification": mean["verify"],
        "old log-probs": mean.get("timing_s/old_log_prob", 0.0),
        "reference": mean.get("timing_s/ref", 0.0),
        "update": mean["timing_s/update_actor"],
    }
    return Row(f"ours, {engine}", mean["timing_s/step"], mean["cpu"], stages, mean["tokens"], mean["score"])


def _our_steps(config, sizes: Sizes) -> dict[str, float]:
    """Means over the steps after the warm-up: seconds, tokens and score."""
    from vapo.learning.learner import make_learner
    from vapo.learning.step import vapo_step
    from vapo.models.sharding import distributed
    from vapo.rollout import collect
    from vapo.tasks import load_task

    seconds: Counter = Counter()
    collect.verify = counted(collect.verify, seconds)
    task = load_task(config.task, split="train", reward=config.reward, reward_timeout=config.reward_timeout)
    with distributed(torch.device("cpu"), config.needs_group) as device, contextlib.ExitStack() as at_end:
        learner = make_learner(config, task, device)
        at_end.callback(learner.sampling.close)
        learner.begin("vapo", config)
        for step in range(1, config.steps + 1):
            if step == WARM_UP + 1:
                seconds.clear()
            began = time.process_time()
            metrics = vapo_step(learner, step, config).metrics
            seconds["cpu"] += time.process_time() - began
            seconds.update({name: metrics[name] for name in metrics if name.startswith("timing_s/")})
            seconds["tokens"] += metrics["response_length/mean"] * sizes.num_responses
            seconds["score"] += metrics["critic/score/mean"]
    return {name: total / sizes.steps for name, total in seconds.items()}


def _trl(sizes: Sizes, rows: Path, folder: Path) -> Row:
    """TRL's trainer, its methods timed; the loss is that of our preset."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    seconds: Counter = Counter()

    class Clock(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs) -> None:
            if state.global_step == WARM_UP:
                seconds.clear()
            self.began, self.began_cpu = time.perf_counter(), time.process_time()

        def on_step_end(self, args, state, control, **kwargs) -> None:
            seconds["step"] += time.perf_counter() - self.began
            seconds["cpu"] += time.process_time() - self.began_cpu

    arguments = GRPOConfig(
        output_dir=str(folder / "trl"),
        model_init_kwargs={"dtype": "float32", "attn_implementation": "sdpa"},
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        seed=SEED,
        max_steps=WARM_UP + sizes.steps,
        per_device_train_batch_size=sizes.num_responses,
        gradient_accumulation_steps=1,
        num_generations=sizes.group_size,
        num_iterations=1,
        max_completion_length=sizes.max_new_tokens,
        temperature=1.0,
        loss_type="grpo",
        beta=0.0,
        epsilon=0.2,
        learning_rate=LR,
        lr_scheduler_type="constant",
        weight_decay=WEIGHT_DECAY,
        max_grad_norm=1.0,
        save_strategy="no",
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    lines = rows.read_text(encoding="utf-8").splitlines()
    trainer = GRPOTrainer(
        model=sizes.model,
        reward_funcs=trainer_rows.last_number,
        args=arguments,
        train_dataset=Dataset.from_list([json.loads(line) for line in lines]),
        callbacks=[Clock()],
    )
    for name in ("_prepare_inputs", "_generate", "_calculate_rewards"):
        setattr(trainer, name, counted(getattr(trainer, name), seconds))
    trainer.train()
    mean = {name: total / sizes.steps for name, total in seconds.items()}
    logged = [line for line in trainer.state.log_history if "completions/mean_length" in line][WARM_UP:]
    tokens = sum(line["completions/mean_length"] for line in logged) / len(logged) * sizes.num_responses
    stages = {
        "sampling": mean["_generate"],
        "verification": mean["_calculate_rewards"],
        "old log-probs": 0.0,
        "reference": 0.0,
        "update": mean["step"] - mean["_prepare_inputs"],
    }
    return Row(TRL, mean["step"], mean["cpu"], stages, tokens, sum(line["reward"] for line in logged) / len(logged))


def _peak_bytes() -> int | None:
    """The high-water mark of this process; not ``ru_maxrss``, which a process inherits from the one that started it."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM")), None)


def measured_apart(trainer: str, sizes: Sizes, python: str, seconds: float) -> Row:
    """The row of a trainer from a process of its own; a failure is a row too."""
    if seconds <= 0:
        return Row(trainer, failure=LEFT_OUT)
    job = json.dumps({"trainer": trainer} | asdict(sizes))
    command = [python, "-m", "benchmarks.bench_trainer", "--job", job]
    threads = {"OMP_NUM_THREADS": str(sizes.threads), "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}
    options = {"cwd": ROOT, "env": os.environ | threads, "capture_output": True, "text": True, "check": False}
    try:
        done = subprocess.run(command, timeout=seconds, **options)
    except subprocess.TimeoutExpired:
        return Row(trainer, failure=f"stopped after {seconds:.0f} s")
    except OSError as error:
        return Row(trainer, failure=str(error))
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        return Row(trainer, failure=f"exit {done.returncode}: {last[:200]}")
    return Row(**json.loads(done.stdout.splitlines()[-1]))


def answer(job: dict) -> Row:
    """What `measured_apart` asks of its process."""
    trainer = job.pop("trainer")
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        try:
            return measure(trainer, Sizes(**job), Path(folder))
        except ImportError as absent:
            return Row(trainer, failure=f"not installed: {absent}")


def markdown(rows: list[Row], sizes: Sizes) -> str:
    """The table, with a note that says what was run, and with which packages where an engine has its own."""
    columns = ["trainer", "tokens/s", "s a step", *STAGES, "CPU s", "tokens a step", "mean reward", "peak MiB"]
    lines = ["### GRPO, seconds a step", "", "| " + " | ".join(columns) + " |"]
    lines.append("|" + "---|" * len(columns))
    for row in rows:
        if row.failure:
            cells = [row.trainer, "–", row.failure, *[""] * (len(columns) - 3)]
        else:
            cells = [row.trainer, f"{row.tokens / row.step:.1f}", f"{row.step:.2f}"]
            cells += [f"{row.stages[stage]:.2f}" for stage in STAGES]
            cells += [f"{row.cpu:.1f}", f"{row.tokens:.0f}", f"{row.reward:.2f}"]
            cells.append("–" if row.peak_bytes is None else f"{row.peak_bytes / 2**20:.0f}")
        lines.append("| " + " | ".join(cells) + " |")
    own = {row.trainer: row.versions for row in rows if row.versions and row.versions != device.versions()}
    others = [f" *{trainer}* ran with {versions}." for trainer, versions in own.items()]
    note = NOTE.format(**asdict(sizes) | {"model": Path(sizes.model).name})
    return "\n".join([*lines, "", note + "".join(others), ""])


def smoke_sizes(folder: Path) -> Sizes:
    """Sizes that only show that everything runs, and in ``folder`` a Llama of random weights whose tokens are bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    end = "<|end|>"
    tokens = Tokenizer(models.BPE({token: number for number, token in enumerate([end, *letters])}, []))
    tokens.pre_tokenizer, tokens.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token=end, pad_token=end)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    width = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    ends = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **width, **ends)).save_pretrained(folder)
    return Sizes(str(folder), num_prompts=2, group_size=2, max_new_tokens=8, steps=1)


def compare(sizes: Sizes, pythons: dict[str, str], budget: float) -> list[Row]:
    """A row of each trainer, printed to stderr as it comes."""
    deadline, rows = time.monotonic() + budget, []
    for trainer in trainers():
        python = pythons.get(trainer.removeprefix("ours, "), sys.executable)
        rows.append(measured_apart(trainer, sizes, python, deadline - time.monotonic()))
        said = rows[-1].failure or f"{rows[-1].step:.1f} s a step"
        print(f"{trainer}: {said}", file=sys.stderr, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder of the model, such as examples/smollm2.py writes")
    parser.add_argument("--smoke", action="store_true", help="a tiny random model and one step: does it run?")
    parser.add_argument("--python", action="append", default=[], metavar="ENGINE=PATH", help="an engine's interpreter")
    parser.add_argument("--budget", type=float, default=580.0, help="seconds for all trainers")
    parser.add_argument("--out", type=Path, default=tables.RESULTS, help="folder of the result files")
    parser.add_argument("--docs", action="store_true", help="also rewrite the table of docs/performance.md")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.job:
        print(json.dumps(asdict(answer(json.loads(arguments.job)))))
        return
    if bool(arguments.model) == arguments.smoke:
        parser.error("either --model or --smoke must be given")
    pythons = dict(pair.split("=", 1) for pair in arguments.python)
    if arguments.smoke:
        with tempfile.TemporaryDirectory() as folder:
            sizes = smoke_sizes(Path(folder, "tiny"))
            print(markdown(compare(sizes, pythons, arguments.budget), sizes))
        return
    command = f"python -m benchmarks.bench_trainer {' '.join(sys.argv[1:])}"
    report(Sizes(str(Path(arguments.model).resolve())), pythons, arguments, command)


def report(sizes: Sizes, pythons: dict[str, str], arguments: argparse.Namespace, command: str) -> None:
    """Measure, print and write the result files, as `benchmarks.run` does."""
    from benchmarks.run import refresh_docs, write

    environment, limits = tables.environment("cpu", command), device.limits("cpu")
    rows = compare(sizes, pythons, arguments.budget)
    text = markdown(rows, sizes)
    print(f"{tables.listed(environment, limits)}\n\n{text}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    stem = arguments.out / f"trainer_{tables.slug(device.name('cpu'))}_{datetime.date.today().isoformat()}"
    sizes = replace(sizes, model=Path(sizes.model).name)
    result = {"sizes": asdict(sizes), "rows": [asdict(row) for row in rows]}
    write(stem, environment, limits, {"trainer": {"result": result, "markdown": text}})
    if arguments.docs:
        refresh_docs(stem, {"trainer": text, "trainer environment": tables.listed(environment, limits)})


if __name__ == "__main__":
    main()
