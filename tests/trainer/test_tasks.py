"""A task is loaded by its name and its reward's."""

import pytest

from vapo.tasks import Problem, load_task


@pytest.mark.parametrize("name", ["running-total", "knights-knaves"])
def test_embedded_tasks_bring_a_tokenizer(name):
    task = load_task(name)
    assert task.name == name
    assert task.tokenizer.eos_token == "<eos>"


def test_knights_and_knaves_has_two_rewards():
    problem, response = Problem("", "A+ B+ C- D-"), "so A+ B- C- D-"
    for reward, score in (("", 0.0), ("all-right", 0.0), ("per-islander", 0.75)):
        assert load_task("knights-knaves", reward=reward).score([problem], [response]) == [(score, False, None)]


def test_math_may_score_an_embedded_task():
    task = load_task("running-total", reward="math")
    assert task.score([Problem("", "4")] * 2, ["# 4", "# 5"]) == [(1.0, True, None), (0.0, False, None)]


@pytest.mark.parametrize(
    ("name", "reward", "message"),
    [
        ("chess", "", r"must be one of running-total, knights-knaves, reasoning-gym:<dataset>, or .*; got 'chess'"),
        ("running-total", "per-islander", r"reward of running-total must be math or .*; got 'per-islander'"),
        ("knights-knaves", "half", r"reward must be one of all-right, per-islander; got 'half'"),
    ],
)
def test_rejects_unknown_names(name, reward, message):
    with pytest.raises(ValueError, match=message):
        load_task(name, reward=reward)


def test_rejects_an_unknown_reward_of_rows(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    with pytest.raises(ValueError, match=r"reward must be math or \"file\.py:function\"; got 'best'"):
        load_task(str(path), reward="best")
