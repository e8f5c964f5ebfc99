"""What both trainers of `benchmarks.bench_trainer` train on: small sums, and the reward of an answer.

Nothing here imports more than the standard library: a verifier's worker reads this file by itself.
"""

import itertools
import json
import re
from pathlib import Path

NUM_ROWS = 64


def write_rows(file: Path) -> None:
    """Write a JSONL file of sums of two to four digits, so that prompts have several lengths."""
    digits = itertools.cycle((3, 7, 2, 9, 4, 8, 5, 6, 1))
    with file.open("w", encoding="utf-8") as out:
        for number in range(NUM_ROWS):
            terms = list(itertools.islice(digits, 2 + number % 3))
            question = f"{' + '.join(map(str, terms))} ="
            row = {"prompt": [{"role": "user", "content": question}], "answer": str(sum(terms))}
            out.write(json.dumps(row) + "\n")


def last_number(completions: list[list[dict]], answer: list[str], **_: object) -> list[float]:
    """1 for each response whose last number is the answer, else 0; called as TRL calls reward functions."""
    found = [re.findall(r"\d+", completion[-1]["content"]) for completion in completions]
    return [float(bool(numbers) and numbers[-1] == right) for numbers, right in zip(found, answer, strict=True)]
