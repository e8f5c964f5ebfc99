"""The command ``vapo``."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Annotated, TypeVar

import tyro

from vapo.config import Config
from vapo.presets import PRESETS, preset, refuse_rl_only

USAGE = """usage: vapo COMMAND [options]

  vapo train             train a small model on two cores in a few minutes, from nothing
  vapo train --resume R  go on with the run in the folder R
  vapo pretrain-value    fit a critic to a fixed policy; `vapo train --critic R --no-value-pretraining` starts from it
  vapo evaluate R        held-out accuracy, pass@k and maj@k of a run or a model
  vapo report R…         one table and one picture that compare runs

  vapo COMMAND --help    list every option
"""

# What may differ in a run that goes on: how long it is, what it records, and where it computes.
RESUMABLE = (
    *("steps", "eval_every", "eval_problems", "eval_samples", "eval_top_p", "logged_samples", "trackers"),
    *("checkpoint_every", "keep_checkpoints", "device", "threads", "micro_batch_tokens", "rollout_batch_size"),
    *("gradient_checkpointing", "reward_timeout", "max_skipped_steps"),
)

# Commands that train, and where they end.
LAST_PHASES = {"train": "vapo", "pretrain-value": "value_pretraining"}


@dataclass(frozen=True, kw_only=True)
class Options(Config):
    """Settings as they stand on the command line."""

    def __post_init__(self) -> None:
        """Leave the checks to `preset`, which knows what was given and what is left to the preset."""


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train a policy: supervised warm start (embedded tasks), value pretraining, RL. The defaults shown are those of
    the preset, task and model that stand beside --help."""

    config: Annotated[Options, tyro.conf.OmitArgPrefixes]
    preset: str = "vapo"
    """The algorithm: vapo, vc_ppo, ppo, grpo or dapo. Options given beside it win."""
    out: str = ""
    """Folder of the run, new or empty; left out, a fresh one under runs/."""
    resume: str = ""
    """Folder of a run to go on with, from its newest checkpoint. Its settings hold; only its length, evaluation,
    record, trackers, device, threads, memory (micro-batches, rollout batches, gradient checkpointing) and the time of
    verifiers may be given anew."""
    dry_run: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print the resolved settings as JSON and stop."""


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Evaluate a policy on held-out problems. What is left out is as the run has it, or `vapo train` for a model."""

    run: Annotated[str, tyro.conf.Positional]
    """Folder of a finished run, whose task, reward, stop tokens and length limit hold, or a hub id or folder of a
    model."""
    task: str | None = None
    """Prompts and verifier, as `vapo train` has it; left out, those that the run evaluated on."""
    reward: str | None = None
    """How responses are scored, as `vapo train` has it."""
    problems: int | None = None
    """Held-out problems."""
    samples: int | None = None
    """Responses to each of them: k of avg@k, pass@k and maj@k."""
    temperature: float | None = None
    """Sampling temperature, > 0."""
    top_p: float | None = None
    """Sample from the likeliest tokens of this mass, in (0, 1]."""
    max_new_tokens: int | None = None
    """Tokens after which a response is cut."""
    seed: int | None = None
    """Seed of the sampling."""
    device: str | None = None
    """Where the model lives: auto, cpu or cuda."""
    dtype: str | None = None
    """What it computes in: float32 or bfloat16."""
    attention: str | None = None
    """sdpa, eager or flash_attention_2."""
    engine: str | None = None
    """What samples: loop or transformers."""
    rollout_batch_size: int | None = None
    """Most responses sampled at once; 0: all."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """Compare runs in one table and one picture."""

    runs: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Folders of runs."""
    out: str = "comparison.png"
    """The picture."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 0, 1 for a run that stopped, 2 for bad input, 130 after Ctrl-C."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    if arguments[0] == "--version":
        print(version("vapo"))
        return 0
    command, options = arguments[0], arguments[1:]
    try:
        if command in LAST_PHASES:
            return _train(*_parse_train(command, options), last_phase=LAST_PHASES[command])
        if command == "evaluate":
            return _evaluate(_parse(Evaluate, "vapo evaluate", options))
        if command == "report":
            return _report(_parse(Report, "vapo report", options))
        raise ValueError(f"command must be train, pretrain-value, evaluate or report; got {command!r}")
    except BrokenPipeError:
        # The reader has left (`vapo train --dry-run | head`); what Python flushes on exit must not meet the pipe again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except ValueError as error:
        print(f"vapo: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nvapo: interrupted", file=sys.stderr)
        return 130


def _train(command: Train, config: Config, *, last_phase: str) -> int:
    if last_phase == "value_pretraining" and not config.pretrains_values:
        raise ValueError("pretrain-value needs a critic and value_pretraining; the preset or the options switch it off")
    if command.dry_run:
        print(json.dumps(asdict(config), indent=2), flush=True)
        return 0
    # Idle OpenMP threads that spin halve the speed of a machine with other work; to be said before torch loads.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from transformers.utils import logging

    from vapo.learning.learner import choose_device
    from vapo.models.sharding import distributed, on_first_rank, rank

    logging.disable_progress_bar()
    with distributed(choose_device(config), alone=config.dtype == "bfloat16"):
        # Ranks that each looked for a fresh name could find different ones.
        folder = on_first_rank(lambda: Path(command.resume) if command.resume else _run_folder(command, config))
        if rank() == 0:
            print(f"run folder: {folder}", flush=True)
        return _run(config, folder, resume=bool(command.resume), last_phase=last_phase)


def _run(config: Config, folder: Path, *, resume: bool, last_phase: str) -> int:
    from vapo.models.sharding import rank
    from vapo.trainer import train

    existed = (folder / "config.json").exists()
    goes_on = f"`vapo train --resume {folder}` goes on from its newest checkpoint"
    try:
        train(config, folder, resume=resume, last_phase=last_phase)
        if last_phase == "value_pretraining" and rank() == 0:
            print(f"`vapo train --critic {folder} --no-value-pretraining …` starts from its critic")
    except ValueError as error:
        if not existed and (folder / "config.json").exists():
            # Once the run records itself, its settings are fine: what goes wrong is a defect and keeps its traceback.
            raise RuntimeError(f"the run in {folder} failed") from error
        raise
    except BrokenPipeError:
        raise
    except OSError as error:
        reason = ": ".join(str(part) for part in (error.strerror or error, error.filename) if part)
        print(f"vapo: the run stopped: {reason}; {goes_on}", file=sys.stderr)
        return 1
    except FloatingPointError as error:
        print(f"vapo: the run stopped: {error}; {goes_on}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\nvapo: interrupted; {goes_on}", file=sys.stderr)
        return 130
    return 0


def _evaluate(command: Evaluate) -> int:
    from vapo.evaluation import evaluate_model

    given = {name: value for name, value in asdict(command).items() if value is not None}
    source = given.pop("run")
    named = {"problems": "eval_problems", "samples": "eval_samples", "top_p": "eval_top_p"}
    metrics = evaluate_model(source, **{named.get(name, name): value for name, value in given.items()})
    width = max(map(len, metrics))
    for name, value in metrics.items():
        print(f"{name:{width}}  {value:.4g}")
    return 0


def _report(command: Report) -> int:
    from vapo.record.comparison import compare

    print(compare([Path(run) for run in command.runs], Path(command.out)))
    print(f"picture: {command.out}")
    return 0


def _parse_train(name: str, arguments: list[str]) -> tuple[Train, Config]:
    """Read the options of a command that trains; preset, task and model set the defaults of all others."""
    algorithm = _value_of("--preset", arguments, default="vapo")
    if algorithm not in PRESETS:
        raise ValueError(f"--preset must be one of {', '.join(PRESETS)}; got {algorithm!r}")
    first = {field: value for field in ("task", "model") if (value := _value_of(f"--{field}", arguments, default=""))}
    defaults = Options(**asdict(preset(algorithm, **first)))
    command = _parse(Train, f"vapo {name}", arguments, default=Train(config=defaults))
    given = {field: getattr(command.config, field) for field in _given_fields(arguments)}
    if LAST_PHASES[name] == "value_pretraining":
        refuse_rl_only(given)
    if not command.resume:
        return command, preset(algorithm, **given)
    if _value_of("--preset", arguments, default="") or command.out:
        raise ValueError("--resume takes the run's own preset and folder; got --preset or --out beside it")
    return command, _resumed_config(Path(command.resume), given)


def _resumed_config(folder: Path, given: dict[str, object]) -> Config:
    """The settings of a run that goes on.

    Raises:
        ValueError: If there is no run, or a setting that its results depend on would change.
    """
    if not (folder / "config.json").is_file():
        raise ValueError(f"--resume must be the folder of a run; got {folder}, which has no config.json")
    saved = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    saved = {name: tuple(value) if isinstance(value, list) else value for name, value in saved.items()}
    unknown = saved.keys() - {field.name for field in fields(Config)}
    if unknown:
        raise ValueError(f"{folder}/config.json must hold known settings; got {', '.join(sorted(unknown))}")
    changed = [
        f"{name} (the run has {saved.get(name)!r}, got {value!r})"
        for name, value in given.items()
        if name not in RESUMABLE and saved.get(name) != value
    ]
    if changed:
        raise ValueError(f"a resumed run keeps its settings, but {', '.join(changed)} would change")
    return Config(**saved | given)


def _given_fields(arguments: list[str]) -> list[str]:
    """The fields of Config that the command line names."""
    names = {field.name for field in fields(Config)}
    options = [argument[2:].partition("=")[0].replace("-", "_") for argument in arguments if argument.startswith("--")]
    return [name for option in options for name in (option, option.removeprefix("no_")) if name in names]


_Command = TypeVar("_Command")


def _parse(kind: type[_Command], program: str, arguments: list[str], default: _Command | None = None) -> _Command:
    complaint = io.StringIO()
    options = {} if default is None else {"default": default}
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(kind, prog=program, args=arguments, use_underscores=False, **options)
    except SystemExit as stop:
        if not stop.code:
            raise
        raise ValueError(_one_line(complaint.getvalue())) from None


def _value_of(option: str, arguments: list[str], default: str) -> str:
    for place, argument in enumerate(arguments):
        if argument == option and place + 1 < len(arguments):
            default = arguments[place + 1]
        elif argument.startswith(f"{option}="):
            default = argument.partition("=")[2]
    return default


def _one_line(box: str) -> str:
    """Shorten tyro's boxed complaint to its sentence, with the option that was perhaps meant."""
    sections: list[list[str]] = [[]]
    for line in filter(None, (line.strip("│ ") for line in box.splitlines())):
        if line[0] in "╭╰" or not line.strip("-─"):
            sections.append([])
        else:
            sections[-1].append(line)
    message = " ".join(sections[1] if len(sections) > 1 else sections[0]).removeprefix("Error parsing config: ")
    hint = next((lines[1].split()[0].rstrip(",") for lines in sections if lines[:1] == ["Perhaps you meant:"]), None)
    return message if hint is None else f"{message}. Perhaps you meant {hint}?"


def _run_folder(command: Train, config: Config) -> Path:
    """The folder asked for, or a fresh one.

    Raises:
        ValueError: If the folder asked for is a file or is not empty.
    """
    if command.out:
        folder = Path(command.out)
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ValueError(f"--out must be a new or an empty folder; got {folder}, which exists")
        return folder
    task = Path(config.task.partition(",")[0]).stem.replace("reasoning-gym:", "")
    stem = f"{task}-{command.preset}-seed{config.seed}"
    names = (stem if number == 1 else f"{stem}-{number}" for number in count(1))
    return next(Path("runs") / name for name in names if not (Path("runs") / name).exists())
