"""Experiment trackers beside ``metrics.jsonl``: tensorboard, trackio and wandb behind one function."""

from __future__ import annotations

import importlib
import json
import os
import uuid
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple


class Tracker(NamedTuple):
    """An open tracker: how it takes the metrics of a step, and how it ends."""

    log: Callable[[int, dict[str, float]], object]
    close: Callable[[], object]


class Trackers:
    """The open trackers of a run, by name; with none, `log` and `close` do nothing.

    A tracker that fails while the run goes on is left out from then on, with a warning: the run's record is
    ``metrics.jsonl``, and no run should end because a server cannot be reached.
    """

    def __init__(self, trackers: dict[str, Tracker]) -> None:
        self._trackers = trackers

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Send the metrics of one step to every tracker.

        Args:
            step: Steps done over all phases together, so that one axis holds the phases one after the other.
            metrics: Name to number.
        """
        for name, tracker in list(self._trackers.items()):
            self._attempt(name, lambda tracker=tracker: tracker.log(step, metrics))

    def close(self) -> None:
        """Finish every tracker; what they buffer is written."""
        for name, tracker in list(self._trackers.items()):
            self._attempt(name, tracker.close)
        self._trackers.clear()

    def _attempt(self, name: str, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:
            del self._trackers[name]
            warnings.warn(f"tracker {name} is left out from here on: {error!r}", RuntimeWarning, stacklevel=3)


def open_trackers(names: Sequence[str], folder: Path, config: dict[str, object]) -> Trackers:
    """Open the trackers called ``names`` for the run in ``folder``.

    ``tensorboard`` writes to ``tensorboard/`` in the folder. ``trackio`` and ``wandb`` log to their project ``vapo``
    (wandb: or the one in WANDB_PROJECT) under the folder's name; where they keep it, and whether they send it, is for
    their own environment variables to say. In a distributed run, open them on the first rank only.

    A run that is resumed does some steps again. In tensorboard they replace the earlier ones; trackio keeps both, and
    wandb, which takes no step twice, keeps the earlier ones.

    Args:
        names: Any of "tensorboard", "trackio", "wandb"; may be empty.
        folder: The run's folder. The run's identity at trackio and wandb is kept there in ``tracker_id``.
        config: The resolved settings.

    Raises:
        ValueError: If a name is unknown or given twice, its package is not installed, or the tracker cannot start.
    """
    check_trackers(names)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    opened: dict[str, Tracker] = {}
    for name in names:
        try:
            opened[name] = _OPENERS[name](folder, json.loads(json.dumps(config, default=str)))
        except Exception as error:
            Trackers(opened).close()
            raise ValueError(f"trackers must be able to start; {name} gave {error!r}") from error
    return Trackers(opened)


def check_trackers(names: Sequence[str]) -> None:
    """Raise the ValueError of `open_trackers` for a name that is unknown, given twice or without its package."""
    if len(set(names)) < len(names) or not _OPENERS.keys() >= set(names):
        raise ValueError(f"trackers must be among {', '.join(_OPENERS)}, each once; got {', '.join(names)}")
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ValueError(
                f"trackers must be installed, all of them by pip install 'vapo[track]'; {name!r} gave: {error}"
            ) from error


def _open_tensorboard(folder: Path, config: dict[str, object]) -> Tracker:
    from torch.utils.tensorboard import SummaryWriter

    logs = folder / "tensorboard"
    is_resumed = logs.exists()
    writers: list[SummaryWriter] = []

    def log(step: int, metrics: dict[str, float]) -> None:
        if not writers:
            # Steps that a resumed run does again replace those logged before.
            writers.append(SummaryWriter(logs, purge_step=step if is_resumed else None))
            writers[0].add_text("config", f"```json\n{json.dumps(config, indent=2)}\n```", step)
        for name, value in metrics.items():
            writers[0].add_scalar(name, value, step)
        # A killed run leaves all that it had logged.
        writers[0].flush()

    return Tracker(log, lambda: [writer.close() for writer in writers])


def _open_trackio(folder: Path, config: dict[str, object]) -> Tracker:
    import trackio

    # A run's name is its identity there, and two folders may have the same name.
    name = f"{folder.resolve().name}-{_run_id(folder)}"
    run = trackio.init(project="vapo", name=name, config=config, resume="allow")
    return Tracker(lambda step, metrics: run.log(metrics, step=step), run.finish)


def _open_wandb(folder: Path, config: dict[str, object]) -> Tracker:
    import wandb

    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", "vapo"),
        name=folder.resolve().name,
        id=_run_id(folder),
        dir=folder,
        config=config,
        resume="allow",
    )
    return Tracker(lambda step, metrics: run.log(metrics, step=step), run.finish)


_OPENERS: dict[str, Callable[[Path, dict[str, object]], Tracker]] = {
    "tensorboard": _open_tensorboard,
    "trackio": _open_trackio,
    "wandb": _open_wandb,
}


def _run_id(folder: Path) -> str:
    """The identity that a run has kept since its first start."""
    path = folder / "tracker_id"
    if not path.exists():
        path.write_text(uuid.uuid4().hex[:8], encoding="utf-8")
    return path.read_text(encoding="utf-8")
