"""The examples run as they are; the verl recipe's settings are composed in tests/integrations."""

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_plain_ppo_learns():
    example = EXAMPLES / "plain_ppo.py"
    assert len(example.read_text(encoding="utf-8").splitlines()) < 120
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, str(example)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    correct = [float(share) for share in re.findall(r"^step +\d+  correct (\S+)$", done.stdout, re.MULTILINE)]
    assert len(correct) == 8
    assert correct[0] < 0.2 < 0.7 < correct[-1]
