"""Problems from files: both forms of rows, malformed ones, the held-out rows and the position in the data."""

import json
import random
import zlib
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from vapo.tasks import Problem, load_task
from vapo.tasks import rows as rows_module
from vapo.tasks.math import final_answer
from vapo.tasks.rows import Rows, read_problems


def chat(text):
    return [{"role": "user", "content": text}]


def verl_row(number, source="sums"):
    return {
        "data_source": source,
        "prompt": chat(f"1 + {number}?"),
        "reward_model": {"style": "rule", "ground_truth": str(1 + number)},
        "extra_info": {"index": number, "split": "train"},
    }


def write(path, rows):
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def unverified(*paths, split="eighth"):
    """Rows without a verifier, whose process takes a while to start."""
    problems = read_problems([Path(path) for path in paths], needs_answer=True)
    return Rows("data", problems, None, vote=final_answer, split=split)


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
@pytest.mark.parametrize("column", ["reward_model", "answer", "solution", "ground_truth"])
def test_verls_and_trls_rows(tmp_path, suffix, column):
    plain = [{"prompt": f"1 + {number}?", column: 1 + number, "level": number} for number in range(16)]
    rows = [verl_row(number) for number in range(16)] if column == "reward_model" else plain
    task = load_task(write(tmp_path / f"data{suffix}", rows))
    for problem in task.problems(5, random.Random(0)):
        number = rows.index(problem.row)
        assert problem.prompt == rows[number]["prompt"]
        assert (problem.answer, problem.data_source) == (str(1 + number), rows[number].get("data_source", "data"))
    right, wrong = rf"\boxed{{{1 + number}}}", rf"\boxed{{{number}}}"
    assert task.score([problem] * 2, [right, wrong]) == [(1.0, True, None), (0.0, False, None)]
    assert task.final_answer(f"so {number}") == str(number)


def test_columns_reach_the_users_function(tmp_path):
    (tmp_path / "mine.py").write_text("def f(completions, level, **_): return [n / 100 for n in level]")
    rows = [{"prompt": str(number), "level": number} for number in range(16)]
    task = load_task(write(tmp_path / "data.jsonl", rows), reward=f"{tmp_path}/mine.py:f")
    problems = task.problems(14, random.Random(0))
    expected = [problem.row["level"] / 100 for problem in problems]
    assert [verdict.score for verdict in task.score(problems, [""] * 14)] == expected
    assert (task.final_answer("so 3"), task.final_answer(r"\boxed{3}")) == (None, "3")
    (tmp_path / "mine.py").write_text("def f(completions, difficulty, **_): return [0.0]")
    with pytest.raises(ValueError, match="must be among answer, completions, level, prompt, prompts; got difficulty"):
        load_task(str(tmp_path / "data.jsonl"), reward=f"{tmp_path}/mine.py:f")


def test_an_epoch_has_every_row_once_in_the_generators_order(tmp_path):
    path = write(tmp_path / "data.jsonl", [verl_row(number) for number in range(16)])
    task = unverified(path)
    rng = random.Random(0)
    epochs = [[problem.answer for problem in task.problems(14, rng)] for _ in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1])
    assert len(set(epochs[0])) == 14
    assert epochs[0] != epochs[1]
    again = unverified(path)
    assert [problem.answer for problem in again.problems(28, random.Random(0))] == epochs[0] + epochs[1]


def test_held_out_rows_are_those_of_lowest_crc32_and_never_trained_on(tmp_path):
    rows = [{"prompt": f"p{number}", "answer": "1"} for number in range(20)]
    task = unverified(write(tmp_path / "data.jsonl", rows + rows[:10]))
    lowest = sorted((row["prompt"] for row in rows), key=lambda prompt: zlib.crc32(prompt.encode()))[:2]
    held_out = [problem.prompt for problem in task.problems(100, random.Random(0), held_out=True)]
    assert sorted(held_out) == sorted(lowest)
    trained_on = [problem.prompt for problem in task.problems(100, random.Random(0))]
    assert set(trained_on) == {row["prompt"] for row in rows} - set(lowest)
    assert len(task.problems(1, random.Random(0), held_out=True)) == 1


def test_the_position_is_restored_within_an_epoch_and_at_its_end(tmp_path):
    path = write(tmp_path / "data.jsonl", [verl_row(number) for number in range(16)])
    for drawn in (0, 5, 14, 20):
        task, rng = unverified(path), random.Random(0)
        task.problems(drawn, rng)
        state = json.loads(json.dumps(task.state_dict()))
        task.problems(3, random.Random(7), held_out=True)
        other, other_rng = unverified(path), random.Random()
        other.load_state_dict(state)
        other_rng.setstate(rng.getstate())
        assert other.problems(30, other_rng) == task.problems(30, rng)
    changed = unverified(write(tmp_path / "data.jsonl", [verl_row(number) for number in range(17)]))
    with pytest.raises(ValueError, match="must hold the same prompts as when the run was saved"):
        changed.load_state_dict(state)


def test_several_files_and_what_they_hold_out(tmp_path):
    rows = [{"prompt": f"a{number}", "answer": "1"} for number in range(4)]
    more = [{"prompt": f"b{number}", "answer": "1"} for number in range(4)]
    paths = write(tmp_path / "a.jsonl", rows), write(tmp_path / "b.parquet", more)
    every = {"a0", "a1", "a2", "a3", "b0", "b1", "b2", "b3"}
    train, held_out = unverified(*paths, split="train"), unverified(*paths, split="held-out")
    assert {problem.prompt for problem in train.problems(8, random.Random(0))} == every
    assert {problem.prompt for problem in held_out.problems(8, random.Random(0), held_out=True)} == every
    assert {problem.data_source for problem in train.problems(8, random.Random(0))} == {"a", "b"}
    for task, side in ((train, True), (held_out, False)):
        with pytest.raises(ValueError, match="of at least 1 problem; got 1 of 0"):
            task.problems(1, random.Random(0), held_out=side)
    with pytest.raises(ValueError, match="split must be one of eighth, train, held-out; got 'half'"):
        load_task(",".join(paths), split="half")


def test_loading_looks_at_each_row_a_few_times_however_many_there_are(monkeypatch):
    class Key(tuple):
        looks = 0

        def __hash__(self):
            Key.looks += 1
            return super().__hash__()

    key_of = rows_module._key
    monkeypatch.setattr(rows_module, "_key", lambda problem: Key(key_of(problem)))
    problems = [Problem(f"p{number}", "1") for number in range(20_000)]
    task = Rows("data", problems, None, vote=final_answer)
    assert len(task.problems(20_000, random.Random(0), held_out=True)) == 2500
    assert Key.looks <= 10 * len(problems)


GOOD = {"prompt": "1 + 1?", "answer": "2"}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"answer": "2"}, "prompt must be text or a list of messages .*; got None"),
        ({"prompt": "", "answer": "2"}, "prompt must be text .*; got ''"),
        ({"prompt": 3, "answer": "2"}, "prompt must be text .*; got 3"),
        ({"prompt": [], "answer": "2"}, r"prompt must be text .*; got \[\]"),
        ({"prompt": ["hello"], "answer": "2"}, r"prompt must be text .*; got \['hello'\]"),
        ({"prompt": [{"role": "user"}], "answer": "2"}, "prompt must be text .*role and content"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}], "answer": "2"}, "content as text"),
        ({"prompt": "p"}, r"an answer in one of answer, solution, ground_truth; got \['prompt'\]"),
        ({"prompt": "p", "answer": None}, "an answer in one of"),
        ({"prompt": "p", "answer": ""}, "an answer in one of"),
        ({"prompt": "p", "reward_model": None}, "reward_model must have a ground_truth; got None"),
        ({"prompt": "p", "reward_model": "rule"}, "reward_model must have a ground_truth; got 'rule'"),
        ({"prompt": "p", "reward_model": {"style": "rule"}}, "reward_model must have a ground_truth"),
        ({"prompt": "p", "answer": "2", "data_source": 5}, "data_source must be text; got 5"),
        (["prompt"], r"a row must be an object with columns; got \['prompt'\]"),
    ],
)
def test_malformed_rows_are_refused_with_file_and_row(tmp_path, row, message):
    path = write(tmp_path / "data.jsonl", [GOOD, GOOD, row, GOOD])
    with pytest.raises(ValueError, match=rf"data\.jsonl: row 3: .*{message}"):
        load_task(path)


def test_a_row_may_not_lack_the_answer_that_others_have(tmp_path):
    (tmp_path / "mine.py").write_text("def f(completions, **_): return [0.0] * len(completions)")
    reward = f"{tmp_path}/mine.py:f"
    load_task(write(tmp_path / "data.jsonl", [{"prompt": "a"}, {"prompt": "b"}]), reward=reward)
    with pytest.raises(ValueError, match="row 2: there must be an answer"):
        load_task(write(tmp_path / "data.jsonl", [GOOD, {"prompt": "b"}]), reward=reward)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.parquet", [verl_row(0), {**verl_row(1), "prompt": None}], r"a\.parquet: row 2: prompt must be text"),
        ("a.jsonl", b"%s\n\n{'prompt': 1}\n", "a\\.jsonl: row 3: a row must be JSON; got b\"{'prompt'"),
        ("a.jsonl", b'%s\n{"prompt": "\xff", "answer": "2"}\n', r"a\.jsonl: row 2: a row must be JSON"),
        ("a.parquet", b"no %s", r"a\.parquet must be a Parquet file"),
        ("a.jsonl", None, r"must be an existing \.parquet or \.jsonl file; got '.*a\.jsonl'"),
        *(
            ("a.jsonl", rows, f"must hold at least 2 different prompts; got {number}")
            for rows, number in (([], 0), ([GOOD], 1), ([GOOD, GOOD], 1))
        ),
    ],
)
def test_rejects_bad_files(tmp_path, name, content, message):
    path = tmp_path / name
    if isinstance(content, list):
        write(path, content)
    elif content:
        path.write_bytes(content % json.dumps(GOOD).encode())
    with pytest.raises(ValueError, match=message):
        load_task(str(path))
