"""``docs/metrics.md`` explains every metric that the trainer names."""

import re
from pathlib import Path

from vapo.evaluation import accuracy_figures

ROOT = Path(__file__).parents[2]
GROUPS = "actor|critic|perf|response_length|reward|rollout|timing_s|val|warm_start"


def explained() -> set[str]:
    """Names in the first column of the tables; ``/max`` stands for the name before it with another ending."""
    names: set[str] = set()
    for line in (ROOT / "docs" / "metrics.md").read_text("utf-8").splitlines():
        if not line.startswith("| `"):
            continue
        last = ""
        for name in re.findall(r"`([^`]+)`", line.split(" | ")[0]):
            last = f"{last.rpartition('/')[0]}{name}" if name.startswith("/") else name
            names.add(last)
    return names


def named_in_source() -> set[str]:
    """Metric names as they stand in the trainer's code, and the blocks that it times."""
    names: set[str] = set()
    # The integrations log to their hosts, under names that the hosts give.
    for path in set((ROOT / "vapo").rglob("*.py")) - set((ROOT / "vapo" / "integrations").rglob("*.py")):
        source = path.read_text("utf-8")
        names |= set(re.findall(rf'"((?:{GROUPS})/[a-z][a-z0-9_/]*)"', source))
        names |= {f"timing_s/{name}" for name in re.findall(r'timed\(metrics, "(\w+)"\)', source)}
    return names


def test_every_metric_is_explained() -> None:
    named = named_in_source()
    assert {"actor/skipped_steps", "timing_s/gen", "critic/lambda_policy/max", "critic/pretrain/vf_loss"} <= named
    assert named - explained() == set()


def test_every_figure_of_an_evaluation_is_explained() -> None:
    families = {re.sub(r"@\d+", "@", name) for name in explained()}
    names = {f"val/{name}" for name in accuracy_figures([True] * 8, ["7"] * 8)}
    assert {re.sub(r"@\d+", "@", name) for name in names} <= {name.replace("@k", "@") for name in families}
