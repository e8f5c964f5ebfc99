"""The command ``vapo``."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Annotated

import tyro

from vapo.config import Config
from vapo.presets import PRESETS, preset

USAGE = """usage: vapo train [options]

  vapo train            train a small model on two cores in a few minutes, from nothing
  vapo train --help     list every setting
  vapo train --dry-run  print the settings that a run would have
"""


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train a policy and a critic with VAPO: supervised warm start, value pretraining, RL."""

    config: Annotated[Config, tyro.conf.OmitArgPrefixes]
    preset: str = "embedded"
    """Settings to start from: embedded, vapo, vc_ppo or ppo. Options given beside it win."""
    out: str = ""
    """Folder of the run, new or empty; left out, a fresh one under runs/."""
    dry_run: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print the resolved settings as JSON and stop."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 0, 2 for bad input, 130 after Ctrl-C."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    if arguments[0] == "--version":
        print(version("vapo"))
        return 0
    try:
        if arguments[0] != "train":
            raise ValueError(f"command must be train; got {arguments[0]!r}")
        return _train(_parse(arguments[1:]))
    except BrokenPipeError:
        # The reader has left (`vapo train --dry-run | head`); what Python flushes on exit must not meet the pipe again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except ValueError as error:
        print(f"vapo: {error}", file=sys.stderr)
        return 2


def _train(command: Train) -> int:
    if command.dry_run:
        print(json.dumps(asdict(command.config), indent=2), flush=True)
        return 0
    folder = _run_folder(command)
    try:
        # Idle OpenMP threads that spin halve the speed of a machine with other work; to be said before torch loads.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        from transformers.utils import logging

        from vapo.trainer import train

        logging.disable_progress_bar()
        print(f"run folder: {folder}")
        train(command.config, folder)
    except ValueError as error:
        if (folder / "config.json").exists():
            # Once the run records itself, its settings are fine: what goes wrong is a defect and keeps its traceback.
            raise RuntimeError(f"the run in {folder} failed") from error
        raise
    except KeyboardInterrupt:
        print(f"\nvapo: interrupted; what was measured is in {folder}", file=sys.stderr)
        return 130
    return 0


def _parse(arguments: list[str]) -> Train:
    """Read the options of ``vapo train``; the preset comes first, since it sets the defaults of all others."""
    name = _value_of("--preset", arguments, default="embedded")
    if name not in PRESETS:
        raise ValueError(f"--preset must be one of {', '.join(PRESETS)}; got {name!r}")
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(
                Train, prog="vapo train", args=arguments, default=Train(config=preset(name)), use_underscores=False
            )
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


def _run_folder(command: Train) -> Path:
    """The folder asked for, or a fresh one.

    Raises:
        ValueError: If the folder asked for is a file or is not empty.
    """
    if command.out:
        folder = Path(command.out)
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ValueError(f"--out must be a new or an empty folder; got {folder}, which exists")
        return folder
    stem = f"{command.config.task}-{command.preset}-seed{command.config.seed}"
    names = (stem if number == 1 else f"{stem}-{number}" for number in count(1))
    return next(Path("runs") / name for name in names if not (Path("runs") / name).exists())
