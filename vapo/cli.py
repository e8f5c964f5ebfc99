"""The command ``vapo``."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from inspect import cleandoc
from itertools import count
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

import tyro

from vapo.config import Config
from vapo.presets import PRESETS, preset, refuse_ineffective
from vapo.settings_file import read_settings_file

USAGE = """usage: vapo COMMAND [options]

  vapo train             train a small model on two cores in a few minutes, from nothing
  vapo train --resume R  go on with the run in the folder R
  vapo pretrain-value    fit a critic to a fixed policy; `vapo train --critic R --no-value-pretraining` starts from it
  vapo evaluate R        held-out accuracy, pass@k and maj@k of a run or a model
  vapo report R…         one table and one picture that compare runs

  vapo COMMAND --help    list every option
"""

# What may differ when a run is resumed: its length, what it records, and where and how fast it computes.
RESUMABLE = (
    *("steps", "eval_every", "eval_problems", "eval_samples", "eval_top_p", "logged_samples", "trackers"),
    *("checkpoint_every", "keep_checkpoints", "device", "threads", "micro_batch_tokens", "rollout_batch_size"),
    *("gradient_checkpointing", "reduce_gradients", "shard_ranks", "reward_timeout", "max_skipped_steps"),
)

# Settings of `vapo evaluate`; their options lose the prefix eval_.
EVALUATION = (
    *("task", "reward", "eval_problems", "eval_samples", "eval_top_p", "temperature", "max_new_tokens", "seed"),
    *("device", "dtype", "attention", "engine", "rollout_batch_size"),
)

# Commands that train, and the phase in which they end.
LAST_PHASES = {"train": "vapo", "pretrain-value": "value_pretraining"}


class Train(TypedDict, total=False):
    """Train a policy: supervised warm start (embedded tasks), value pretraining, RL. The defaults shown are those of
    the preset, task and model given with --help."""

    preset: Literal[tuple(PRESETS)]
    """The algorithm; "vapo" if left out. Options given with it override its settings."""
    config: str
    """File of settings, YAML or JSON: fields of this list by their names in Python, and perhaps "preset". Options given
    with it override its settings. A run's config.json will do."""
    out: str
    """Folder of the run, new or empty; a new one in runs/ if left out."""
    resume: str
    """Folder of a run to go on with, from its newest checkpoint. Its settings hold; only its length, evaluation,
    record, trackers, device, threads, memory (micro-batches, rollout batches, gradient checkpointing), the time limit
    of verifiers and the number of skipped steps may be given anew."""
    dry_run: bool
    """Check that data, models, trackers and packages are there, without reading weights; print the settings as JSON
    and, to stderr, the memory that each rank needs; and stop."""


class _First(TypedDict, total=False):
    preset: Literal[tuple(PRESETS)]
    config: str
    task: str
    model: str


class Evaluate(TypedDict):
    """Evaluate a policy on held-out problems. Settings left out are those of the run, or of `vapo train` for a
    model."""

    run: tyro.conf.Positional[str]
    """Folder of a finished run, whose task, reward, stop tokens and length limit hold, or a hub id or folder of a
    model."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """Compare runs in one table and one picture."""

    runs: tyro.conf.Positional[tuple[str, ...]]
    """Folders of runs."""
    out: str = "comparison.png"
    """The picture."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        The exit status: 0, 1 for a run that failed, 2 for bad input, 130 after Ctrl-C, 143 after SIGTERM.

    Raises:
        SystemExit: With 0 after ``--help``, and with 2 after tyro's message about an option that it cannot read.
    """
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
            return _train(command, options)
        if command == "evaluate":
            return _evaluate(options)
        if command == "report":
            return _report(options)
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


def _train(command: str, arguments: list[str]) -> int:
    options, config = _read_train(command, arguments)
    last_phase = LAST_PHASES[command]
    if last_phase == "value_pretraining" and not config.pretrains_values:
        raise ValueError("pretrain-value needs a critic and value_pretraining; the preset or the options switch it off")
    if options.get("dry_run"):
        return _dry_run(config, last_phase)
    # Idle OpenMP threads that spin halve the speed of a machine with other work; must be set before torch loads.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from transformers.utils import logging

    from vapo.learning.learner import choose_device
    from vapo.models.auto import resolve_auto
    from vapo.models.sharding import distributed, on_first_rank, rank

    logging.disable_progress_bar()
    device = choose_device(config)
    with distributed(device, alone=resolve_auto(config, device)[0].needs_group):
        # Ranks that each looked for an unused name could find different ones.
        folder = on_first_rank(lambda: Path(options["resume"]) if "resume" in options else _run_folder(options, config))
        if rank() == 0:
            print(f"run folder: {folder}", flush=True)
        return _run(config, folder, resume="resume" in options, last_phase=last_phase)


def _dry_run(config: Config, last_phase: str) -> int:
    from vapo.models.memory import memory_table
    from vapo.trainer import check_run

    parts = check_run(config, ranks=int(os.environ.get("WORLD_SIZE", 1)), last_phase=last_phase)
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(asdict(config), indent=2), flush=True)
        print(memory_table(parts), file=sys.stderr)
    return 0


def _run(config: Config, folder: Path, *, resume: bool, last_phase: str) -> int:
    from vapo.models.sharding import rank
    from vapo.stopping import RunStopped
    from vapo.trainer import train

    # Asked now: vLLM takes the process group with it.
    existed, is_first = (folder / "config.json").exists(), rank() == 0
    goes_on = f"`vapo train --resume {folder}` goes on from its newest checkpoint"
    try:
        train(config, folder, resume=resume, last_phase=last_phase)
        if last_phase == "value_pretraining" and is_first:
            print(f"`vapo train --critic {folder} --no-value-pretraining …` starts from its critic")
    except ValueError as error:
        if not existed and (folder / "config.json").exists():
            # Once the run records itself, its settings are fine: what fails then is a defect and keeps its traceback.
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
    except RunStopped as stopped:
        if is_first:
            print(f"\nvapo: {stopped}; `vapo train --resume {folder}` goes on", file=sys.stderr)
        return 128 + stopped.number
    except KeyboardInterrupt:
        print(f"\nvapo: interrupted; {goes_on}", file=sys.stderr)
        return 130
    return 0


def _evaluate(arguments: list[str]) -> int:
    options, settings = _parse(Evaluate, _settings(EVALUATION), "vapo evaluate", arguments)
    from vapo.evaluation import evaluate_model

    metrics = evaluate_model(options["run"], **settings)
    width = max(map(len, metrics))
    for name, value in metrics.items():
        print(f"{name:{width}}  {value:.4g}")
    return 0


def _report(arguments: list[str]) -> int:
    options = tyro.cli(Report, prog="vapo report", args=arguments)
    from vapo.record.comparison import compare

    print(compare([Path(run) for run in options.runs], Path(options.out)))
    print(f"picture: {options.out}")
    return 0


def _read_train(command: str, arguments: list[str]) -> tuple[Train, Config]:
    """Read the options of a command that trains; preset, task and model determine the defaults of all others."""
    prog = f"vapo {command}"
    first, _ = tyro.cli(_First, prog=prog, args=arguments, add_help=False, return_unknown_args=True)
    file = first.pop("config", None)
    from_file = read_settings_file(file) if file else {}
    algorithm = first.pop("preset", from_file.pop("preset", "vapo"))
    defaults = asdict(_preset(algorithm, file, from_file, **first))
    options, given = _parse(Train, _settings(list(defaults), defaults), prog, arguments)
    last_phase = LAST_PHASES[command]
    if "resume" not in options:
        return options | {"preset": algorithm}, _preset(algorithm, file, from_file, last_phase=last_phase, **given)
    if options.keys() & {"preset", "out", "config"}:
        raise ValueError("--resume takes the run's own settings and folder; got --preset, --config or --out with it")
    return options, _resumed_config(Path(options["resume"]), given, last_phase)


def _preset(algorithm: str, file: str | None, from_file: dict[str, object], **given: object) -> Config:
    """`preset`; where a file was read, an error says so."""
    try:
        return preset(algorithm, from_file=from_file, **given)
    except ValueError as error:
        raise ValueError(f"{error} (with the settings of {file})" if file else str(error)) from None


def _parse(command: type, settings: type, prog: str, arguments: list[str]) -> tuple[dict[str, Any], dict[str, object]]:
    """Read the options of ``command`` and the settings: two dicts of what is given, without defaults."""
    groups = {"command": command, "settings": settings}
    both = tyro.conf.OmitArgPrefixes[TypedDict("both", groups)]
    read = tyro.cli(both, description=cleandoc(command.__doc__), prog=prog, args=arguments)
    return read["command"], read["settings"]


def _settings(names: Sequence[str], defaults: Mapping[str, object] | None = None) -> type:
    """Settings as options that may be left out, with their documentation and the defaults that --help shows."""
    documented = Config.__pydantic_fields__
    return TypedDict(
        "settings",
        {
            name: Annotated[
                documented[name].annotation,
                tyro.conf.arg(
                    name=name.removeprefix("eval_") if defaults is None else name,
                    help=documented[name].description,
                    help_behavior_hint="" if defaults is None else f"(default: {defaults[name]!r})",
                ),
            ]
            for name in names
        },
        total=False,
    )


def _resumed_config(folder: Path, given: dict[str, object], last_phase: str) -> Config:
    """The settings of a run that goes on.

    Raises:
        ValueError: If there is no run, a setting that its results depend on would change, or one has no effect.
    """
    if not (folder / "config.json").is_file():
        raise ValueError(f"--resume must be the folder of a run; got {folder}, which has no config.json")
    saved = Config.from_json(folder / "config.json")
    changed = [
        f"{name} (the run has {getattr(saved, name)!r}, got {value!r})"
        for name, value in given.items()
        if name not in RESUMABLE and getattr(saved, name) != value
    ]
    if changed:
        raise ValueError(f"a resumed run keeps its settings, but {', '.join(changed)} would change")
    refuse_ineffective(saved, given, last_phase=last_phase)
    return replace(saved, **given)


def _run_folder(options: Train, config: Config) -> Path:
    """The folder given, or an unused one.

    Raises:
        ValueError: If the folder given is a file or is not empty.
    """
    if "out" in options:
        folder = Path(options["out"])
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ValueError(f"--out must be a new or an empty folder; got {folder}, which exists")
        return folder
    task = Path(config.task.partition(",")[0]).stem.replace("reasoning-gym:", "")
    stem = f"{task}-{options['preset']}-seed{config.seed}"
    names = (stem if number == 1 else f"{stem}-{number}" for number in count(1))
    return next(Path("runs") / name for name in names if not (Path("runs") / name).exists())
