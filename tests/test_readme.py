"""What the README shows runs; what it and the pages name exists."""

import re
from pathlib import Path

import pytest
import torch

import vapo_kernels

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_training_step_runs():
    code = re.search(r"```python\n(.*?)```", README, re.S).group(1)
    n, v = 6, 11
    names = {
        "rewards": torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0, 0.0]),
        "old_values": torch.rand(n),
        "cu_seqlens": torch.tensor([0, 3, 6]),
        "mask": torch.ones(n, dtype=torch.bool),
        "logits": torch.randn(n, v, requires_grad=True),
        "token_ids": torch.randint(0, v, (n,)),
        "old_logprobs": torch.full((n,), 1 / v).log(),
        "is_correct": torch.tensor([True, True, True, False, False, False]),
        "values": torch.rand(n, requires_grad=True),
        "step_tokens": n,
        "step_correct_tokens": 3,
    }
    exec(code, names)
    assert names["logits"].grad.abs().sum() > 0
    assert names["values"].grad.abs().sum() > 0


def test_every_public_op_is_named():
    api = (ROOT / "docs" / "ops.md").read_text("utf-8")
    for name in vapo_kernels.__all__:
        assert f"::: vapo_kernels.{name}\n" in api, name
        assert not name[0].islower() or f"`{name}`" in README, name


def test_every_file_of_the_tree_exists():
    tree = re.search(
        r"## The tree\n\n```\n(.*?)```", (ROOT / "docs" / "architecture.md").read_text("utf-8"), re.S
    ).group(1)
    folder = ROOT
    for line in tree.splitlines():
        names = re.findall(r"\b[\w/<>]+(?:\.py|\.md)|^ *[\w/]+/", line)
        if not line.startswith(" "):
            folder = ROOT / line.split()[0]
            assert folder.is_dir(), line
        for name in map(str.strip, names):
            assert any(path.exists() for path in (folder / name, ROOT / name, *folder.glob(f"*/{name}"))), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_exists(page):
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text("utf-8"), flags=re.S)
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", text):
        assert (page.parent / link).exists(), link
