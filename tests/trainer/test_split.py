"""Problems of a side are told apart by their prompts; asking for more than there are is an error."""

import random
import zlib

import pytest

from vapo.tasks import Problem
from vapo.tasks.split import draw_problems, is_held_out, prompt_crc32


def numbers(rng):
    return Problem(str(rng.randrange(64)), "")


def test_a_side_is_known_by_the_prompt():
    assert prompt_crc32("a") == zlib.crc32(b"a")
    assert prompt_crc32([{"role": "user", "content": "λ"}]) == zlib.crc32('[{"content": "λ", "role": "user"}]'.encode())
    assert [is_held_out(str(number)) for number in range(64)] == [
        zlib.crc32(str(number).encode()) % 8 == 0 for number in range(64)
    ]


def test_held_out_problems_are_all_there_are_and_no_more():
    prompts = [str(number) for number in range(64) if is_held_out(str(number))]
    drawn = draw_problems(numbers, len(prompts), random.Random(0), held_out=True)
    assert sorted(problem.prompt for problem in drawn) == sorted(prompts)
    with pytest.raises(ValueError, match=f"count must be at most {len(prompts)}, the held-out problems"):
        draw_problems(numbers, len(prompts) + 1, random.Random(0), held_out=True)


def test_problems_to_train_on_may_repeat():
    drawn = draw_problems(numbers, 500, random.Random(0), held_out=False)
    assert len(drawn) == 500
    assert not any(is_held_out(problem.prompt) for problem in drawn)


def test_rejects_bad_counts():
    with pytest.raises(ValueError, match="count must be >= 0; got -1"):
        draw_problems(numbers, -1, random.Random(0), held_out=False)
    with pytest.raises(ValueError, match="count must be >= 0 and <= 3 for held-out problems; got 4"):
        draw_problems(numbers, 4, random.Random(0), held_out=True, num_held_out=3)
