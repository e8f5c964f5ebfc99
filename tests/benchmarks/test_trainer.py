"""The benchmark of whole trainers: both see the same rows and reward, and a trainer that is absent says so."""

import json
import sys

import pytest

from benchmarks import bench_trainer
from benchmarks.trainer_rows import NUM_ROWS, last_number, write_rows


def test_reward_is_the_last_number_of_a_sum(tmp_path):
    write_rows(tmp_path / "rows.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    questions = [row["prompt"][0]["content"] for row in rows]
    answers = [row["answer"] for row in rows]
    assert len(rows) == NUM_ROWS and {len(question) for question in questions} == {7, 11, 15}
    assert [str(eval(question.removesuffix("="))) for question in questions] == answers
    responses = [f"1 + 1 = 2, so {answers[0]}.", f"{answers[1]} or 99", "no idea"]
    completions = [[{"role": "assistant", "content": response}] for response in responses]
    assert last_number(completions, answers[:3]) == [1.0, 0.0, 0.0]


@pytest.fixture(scope="module")
def sizes(tmp_path_factory):
    return bench_trainer.smoke_sizes(tmp_path_factory.mktemp("model"))


def test_every_trainer_has_a_row(sizes):
    rows = bench_trainer.compare(sizes, {"vllm": "/no/such/python"}, budget=300)
    table = bench_trainer.markdown(rows, sizes)
    assert [row.trainer for row in rows] == bench_trainer.trainers()
    assert not {"TRL GRPOTrainer", "ours, loop", "ours, transformers"} - {row.trainer for row in rows}
    for row in rows:
        assert f"| {row.trainer} |" in table
        if row.failure:
            may_fail = row.trainer in (bench_trainer.TRL, "ours, vllm")
            assert may_fail and row.failure.startswith(("not installed: ", "[Errno 2]")) and row.failure in table
        else:
            assert list(row.stages) == list(bench_trainer.STAGES)
            assert min(row.stages["sampling"], row.stages["update"]) > 0 and row.stages["other"] > -1e-6
            assert sum(row.stages.values()) == pytest.approx(row.step)
            assert sizes.num_responses <= row.tokens <= sizes.num_responses * sizes.max_new_tokens
            assert row.peak_bytes > 2**27


def test_a_trainer_that_dies_or_comes_too_late_has_a_row_that_says_so(sizes):
    row = bench_trainer.measured_apart("ours, json", sizes, sys.executable, 60)
    assert row.failure.startswith("exit 1: ValueError: engine")
    (row, *_) = bench_trainer.compare(sizes, {}, budget=0)
    assert row.failure == bench_trainer.LEFT_OUT and row.failure in bench_trainer.markdown([row], sizes)
