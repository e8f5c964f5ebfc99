import re
import shlex
from pathlib import Path

import pytest

RECIPE = Path(__file__).parents[2] / "examples" / "verl_vapo.sh"


@pytest.fixture
def recipe_overrides() -> list[str]:
    """The settings that the recipe gives to verl's trainer, with its shell variables at their defaults."""
    text = RECIPE.read_text(encoding="utf-8")
    _, _, command = text.partition("verl.trainer.main_ppo")
    command = re.sub(r"\$\{?(\w+)\}?", lambda found: default_of(found[1], text), command.replace("\\\n", " "))
    return [word for word in shlex.split(command, comments=True) if "=" in word]


def default_of(variable: str, text: str) -> str:
    found = re.search(rf'^{variable}="?\$\{{{variable}:-([^}}]*)\}}', text, re.MULTILINE)
    return found[1] if found else ""
