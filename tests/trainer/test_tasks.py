"""What holds for every task that generates its problems, and how tasks and rewards are loaded."""

import random

import pytest
from transformers import AutoTokenizer

from vapo.tasks import Problem, load_task
from vapo.tasks.split import is_held_out

COUNTS = {"running-total": (400, 2000), "knights-knaves": (400, 2000), "reasoning-gym:knights_knaves": (20, 60)}


@pytest.fixture(scope="module", params=COUNTS)
def generated(request):
    return load_task(request.param)


def test_split_is_disjoint_and_held_out_problems_differ(generated):
    num_held_out, num_training = COUNTS[generated.name]
    held_out = generated.problems(num_held_out, random.Random(0), held_out=True)
    training = generated.problems(num_training, random.Random(0))
    assert len(training) == num_training
    assert len({str(problem.prompt) for problem in held_out}) == num_held_out
    assert all(is_held_out(problem.prompt) for problem in held_out)
    assert not any(is_held_out(problem.prompt) for problem in training)


def test_problems_depend_on_the_generator_alone(generated):
    first, again, other = (generated.problems(5, random.Random(seed)) for seed in (1, 1, 2))
    assert first == again != other
    assert generated.state_dict() == {}


@pytest.mark.parametrize(("name", "most", "size"), [("running-total", 4000, 21), ("knights-knaves", 2000, 29)])
def test_embedded_tasks_have_a_tokenizer_that_survives_saving_and_reject_bad_counts(name, most, size, tmp_path):
    task, rng = load_task(name), random.Random(0)
    assert (task.name, len(task.tokenizer)) == (name, size)
    task.tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert (loaded.eos_token, loaded.pad_token) == ("<eos>", "<pad>")
    for problem in task.problems(20, rng):
        for text in (problem.prompt, task.demonstration(problem, rng)):
            ids = task.tokenizer(text).input_ids
            assert len(ids) == len(text.split())
            assert loaded(text).input_ids == ids
            assert loaded.decode(ids) == task.tokenizer.decode(ids) == text
    for count, held_out in ((-1, False), (most + 1, True)):
        with pytest.raises(ValueError, match=f"count must be .*; got {count}"):
            task.problems(count, rng, held_out=held_out)


@pytest.mark.parametrize(
    ("name", "reward", "response", "score"),
    [
        ("knights-knaves", "", "so A+ B- C- D-", 0.0),
        ("knights-knaves", "all-right", "so A+ B- C- D-", 0.0),
        ("knights-knaves", "per-islander", "so A+ B- C- D-", 0.75),
        ("knights-knaves", "math", "so 4", 0.0),
        ("running-total", "", "# 4", 0.0),
        ("running-total", "math", "# 5", 0.0),
    ],
)
def test_a_reward_is_chosen_by_its_name(name, reward, response, score):
    assert load_task(name, reward=reward).score([Problem("", "A+ B+ C- D-")], [response]) == [(score, False, None)]
    if reward == "math":
        assert load_task(name, reward=reward).score([Problem("", "4")], ["# 4"]) == [(1.0, True, None)]


@pytest.mark.parametrize(
    ("name", "reward", "message"),
    [
        ("chess", "", r"must be one of running-total, knights-knaves, reasoning-gym:<dataset>, or .*; got 'chess'"),
        ("running-total", "per-islander", r"must be math or \"file\.py:function\"; got 'per-islander'"),
        ("knights-knaves", "half", r"reward must be one of all-right, per-islander; got 'half'"),
        ("{folder}/rows.jsonl", "half", r"reward must be math or \"file\.py:function\"; got 'half'"),
        ("reasoning-gym:chess", "", "dataset of reasoning-gym must be one of .*knights_knaves.*; got 'chess'"),
        ("reasoning-gym:composite", "", "at least one dataset"),
        ("reasoning-gym:chain_sum", "all-right", "must be math or \"file.py:function\"; got 'all-right'"),
        ("reasoning-gym:knights_knaves", "half", "must be all-right, per-islander, math or .*; got 'half'"),
    ],
)
def test_rejects_unknown_names(tmp_path, name, reward, message):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    with pytest.raises(ValueError, match=message):
        load_task(name.format(folder=tmp_path), reward=reward)
