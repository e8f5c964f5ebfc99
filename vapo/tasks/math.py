"""The reward ``math``: the answer in the last ``\\boxed{}``, or else the last number, compared by math-verify."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence

from vapo.tasks import Problem, Verdict
from vapo.tasks.worker import Verifier

_NUMBER = re.compile(r"(?<![\w)])-?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+|(?<=\d))(?:/\d+)?")
_BOXED = "\\boxed{"


def math_verifier() -> Verifier:
    """Build the verifier.

    Raises:
        ValueError: If math-verify is not installed.
    """
    try:
        import math_verify
    except ImportError as error:
        raise ValueError(f"reward 'math' needs math-verify: pip install 'vapo[tasks]' ({error})") from error
    # It warns that its own time limits are off; the pool's hold instead.
    logging.getLogger(math_verify.__name__).setLevel(logging.ERROR)
    return Verifier(score)


def score(problems: Sequence[Problem], responses: Sequence[str]) -> list[Verdict]:
    """Give 1 to each response whose answer equals the problem's, else 0."""
    verdicts = []
    for problem, response in zip(problems, responses, strict=True):
        given = final_answer(response)
        is_correct = given is not None and _are_equal(reference_answer(problem.answer), given)
        verdicts.append(Verdict(float(is_correct), is_correct))
    return verdicts


def final_answer(response: str) -> str | None:
    """Return the content of the last ``\\boxed{}``, or else the last number without thousands separators.

    Example:
        >>> final_answer("x = 3, so \\\\boxed{\\\\frac{1}{2}}"), final_answer("They pay $1,234.50 in all.")
        ('\\\\frac{1}{2}', '1234.50')
    """
    boxed = boxed_answer(response)
    if boxed is not None:
        return boxed
    numbers = _NUMBER.findall(response)
    return numbers[-1].replace(",", "") if numbers else None


def boxed_answer(text: str) -> str | None:
    """Return the content of the last ``\\boxed{}``; None if there is none or it is not closed."""
    start = text.rfind(_BOXED)
    if start < 0:
        return None
    depth, start = 1, start + len(_BOXED)
    for at in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[start:at].strip()
    return None


def reference_answer(answer: str) -> str:
    """Return the answer from a column that may hold a worked solution: boxed, after ``####``, or all of it.

    Example:
        >>> reference_answer("2 + 2 = 4, so #### 4"), reference_answer("3/4")
        ('4', '3/4')
    """
    boxed = boxed_answer(answer)
    return answer.rpartition("####")[2].strip() if boxed is None else boxed


def _are_equal(reference: str, given: str) -> bool:
    if reference == given:
        return True
    from math_verify import parse, verify

    parsed = (parse(f"{_BOXED}{text}}}", parsing_timeout=None) for text in (reference, given))
    return bool(verify(*parsed, timeout_seconds=None))
