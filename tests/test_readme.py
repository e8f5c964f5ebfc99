"""What the README shows runs, and what it names exists."""

import re
from pathlib import Path

import torch

README = (Path(__file__).parents[1] / "README.md").read_text()


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


def test_every_file_that_is_named_exists():
    root = Path(__file__).parents[1]
    tree = re.search(r"## The tree\n\n```\n(.*?)```", README, re.S).group(1)
    folder = root
    for line in tree.splitlines():
        names = re.findall(r"\b[\w/<>]+(?:\.py|\.md)|^ *[\w/]+/", line)
        if not line.startswith(" "):
            folder = root / line.split()[0]
            assert folder.is_dir(), line
        for name in (name.strip() for name in names if "<" not in name):
            assert any(path.exists() for path in (folder / name, root / name, *folder.glob(f"*/{name}"))), name
    links = re.findall(r"\]\((?!http)([^)#]+)\)", README)
    assert links
    for link in links:
        assert (root / link).exists(), link
