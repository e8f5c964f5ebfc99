"""The prompt alone decides on which side a problem is; asking for more problems than there are is an error."""

import random
import zlib

import pytest

from vapo.tasks import Problem
from vapo.tasks.split import GeneratedTask, is_held_out, prompt_crc32


class Numbers(GeneratedTask):
    """Prompts "0" to "63"."""

    def _generate(self, rng):
        return Problem(str(rng.randrange(64)), "")


PROMPTS = [str(number) for number in range(64)]
HELD_OUT = [prompt for prompt in PROMPTS if zlib.crc32(prompt.encode()) % 8 == 0]


def test_the_prompt_decides():
    assert prompt_crc32("a") == zlib.crc32(b"a")
    assert prompt_crc32([{"role": "user", "content": "λ"}]) == zlib.crc32('[{"content": "λ", "role": "user"}]'.encode())
    assert [prompt for prompt in PROMPTS if is_held_out(prompt)] == HELD_OUT
    held_out = Numbers().problems(len(HELD_OUT), random.Random(0), held_out=True)
    assert sorted(problem.prompt for problem in held_out) == sorted(HELD_OUT)
    training = Numbers().problems(500, random.Random(0))  # They may repeat.
    assert len(training) == 500 and {problem.prompt for problem in training} == set(PROMPTS) - set(HELD_OUT)


@pytest.mark.parametrize(
    ("count", "held_out", "most", "message"),
    [
        (-1, False, None, "must be >= 0; got -1"),
        (4, True, 3, "must be >= 0 and <= 3 for held-out problems; got 4"),
        (len(HELD_OUT) + 1, True, None, f"must be at most {len(HELD_OUT)}, the held-out problems found; got"),
    ],
)
def test_rejects_bad_counts(count, held_out, most, message):
    task = Numbers()
    task.num_held_out = most
    with pytest.raises(ValueError, match=f"count {message}"):
        task.problems(count, random.Random(0), held_out=held_out)
