"""MT-bench, GSM8K, HumanEval and MATH-500 in their published forms: what is read, how it is worded, what is refused."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict
from test_eval_prompts import write

from eagle3.errors import DataError
from eval.prompts import read_prompt_set, read_prompt_sets

SAMPLES = Path(__file__).resolve().parents[3] / "data" / "eval" / "samples"
NAMES = ("mtbench", "gsm8k", "humaneval", "math500")


def sample(name: str) -> list[dict]:
    return [json.loads(line) for line in (SAMPLES / f"{name}_like.jsonl").read_text().splitlines()]


def test_shipped_samples_are_read_under_names_of_their_own() -> None:
    sets = read_prompt_sets([f"{name}:{SAMPLES / f'{name}_like.jsonl'}" for name in NAMES])
    assert [(one.name, len(one.prompts)) for one in sets] == [(f"{name}_like", 8) for name in NAMES]
    texts = [[prompt.messages[-1]["content"] for prompt in one.prompts] for one in sets]
    assert texts[0][0] == sample("mtbench")[0]["turns"][0]
    assert texts[1][0].startswith(sample("gsm8k")[0]["question"]) and "step by step" in texts[1][0]
    assert f"```python\n{sample('humaneval')[3]['prompt'].strip()}\n```" in texts[2][3]
    assert texts[3][7].startswith(sample("math500")[7]["problem"]) and "\\boxed{}" in texts[3][7]
    assert [p.id for p in sets[2].prompts[:2]] == ["Like/0", "Like/1"]
    assert sets[3].prompts[0].id == "like/algebra/1.json"
    assert [p.id for p in sets[1].prompts[:2]] == ["1", "2"]


def test_answers_stay_out_of_the_prompts() -> None:
    for name, field in (("gsm8k", "answer"), ("humaneval", "canonical_solution"), ("math500", "solution")):
        prompts = read_prompt_set(f"{name}:{SAMPLES / f'{name}_like.jsonl'}").prompts
        for prompt, record in zip(prompts, sample(name), strict=True):
            assert record[field].strip() not in prompt.messages[-1]["content"]


def test_the_samples_solutions_are_right() -> None:
    for record in sample("humaneval"):
        space: dict = {}
        exec(record["prompt"] + record["canonical_solution"] + "\n" + record["test"], space)
        space["check"](space[record["entry_point"]])
    for record in sample("gsm8k"):
        for sum_, value in re.findall(r"<<(.+?)=(.+?)>>", record["answer"]):
            assert eval(sum_) == float(value)
        assert record["answer"].split("#### ")[1] in record["answer"].split("\n")[-2]
    for record in sample("math500"):
        assert f"\\boxed{{{record['answer']}}}" in record["solution"]


def test_second_turns_follow_the_reference_answer() -> None:
    one = read_prompt_set(f"mtbench2:{SAMPLES / 'mtbench_like.jsonl'}")
    assert one.name == "mtbench2-mtbench_like"
    assert [p.id for p in one.prompts] == ["3", "4", "5"]  # those with a reference answer
    record = sample("mtbench")[2]
    assert [m["role"] for m in one.prompts[0].messages] == ["user", "assistant", "user"]
    assert [m["content"] for m in one.prompts[0].messages] == [
        record["turns"][0],
        record["reference"][0],
        record["turns"][1],
    ]


def test_published_file_names_and_gzip(tmp_path) -> None:
    gsm = write(tmp_path / "test.jsonl", {"question": "1+1?", "answer": "#### 2"})
    turns = write(tmp_path / "question.jsonl", {"question_id": 81, "category": "writing", "turns": ["a", "b"]})
    packed = tmp_path / "HumanEval.jsonl.gz"
    packed.write_bytes(gzip.compress(b'{"task_id": "HumanEval/0", "prompt": "def f():\\n"}\n'))
    sets = read_prompt_sets([f"gsm8k:{gsm}", f"MTBench:{turns}", f"humaneval:{packed}"])
    assert [(one.name, one.prompts[0].id) for one in sets] == [
        ("gsm8k", "1"), ("mtbench", "81"), ("HumanEval", "HumanEval/0"),
    ]  # fmt: skip


def test_saved_datasets(tmp_path) -> None:
    rows = Dataset.from_list([{"problem": "p", "answer": "1", "unique_id": f"test/{k}.json"} for k in range(4)])
    rows.save_to_disk(tmp_path / "MATH-500")
    DatasetDict({"train": rows, "test": rows.select([2])}).save_to_disk(tmp_path / "both")
    one = read_prompt_set(f"math500:hf:{tmp_path / 'MATH-500'}", max_prompts=3)
    assert (one.name, [p.id for p in one.prompts]) == ("MATH-500", ["test/0.json", "test/1.json", "test/2.json"])
    assert [p.id for p in read_prompt_set(f"math500:hf:{tmp_path / 'both'}").prompts] == ["test/2.json"]
    rows.select_columns(["answer"]).save_to_disk(tmp_path / "bare")
    with pytest.raises(DataError, match=r"not a record of math500 \[.*bare, record 1\]: it has no 'problem'"):
        read_prompt_set(f"math500:hf:{tmp_path / 'bare'}")


@pytest.mark.parametrize(
    ("entry", "line", "words"),
    [
        ("gsm8k", {"prompt": "x"}, r"not a record of gsm8k .*line 2\]: it has no 'question'"),
        ("gsm8k", {"question": 3}, "question is not a text"),
        ("gsm8k", ["x"], "found list"),
        ("mtbench", {"question_id": 1, "turns": "a"}, "turns is not a list of texts"),
        ("mtbench", {"question_id": 1, "turns": []}, "turns is not a list of texts"),
        ("mtbench", "{broken", r"not a JSON line .*line 2\]"),
        ("humaneval", {"task_id": "a", "prompt": " "}, "prompt is not a text"),
        ("math500", {"unique_id": "a"}, "it has no 'problem'"),
    ],
)
def test_bad_records_name_file_and_line(tmp_path, entry, line, words) -> None:
    path = write(tmp_path / "bad.jsonl", sample(entry)[0], line)
    with pytest.raises(DataError, match=words) as error:
        read_prompt_set(f"{entry}:{path}")
    assert "bad.jsonl" in str(error.value) and "\n" not in str(error.value)


def test_unknown_sets_and_hub_names_are_refused_in_one_line(tmp_path, monkeypatch) -> None:
    with pytest.raises(DataError, match=r"gsm9k:/x/y.jsonl.*sets known by name are mtbench, mtbench2, gsm8k"):
        read_prompt_set("gsm9k:/x/y.jsonl")
    with pytest.raises(DataError, match=r"cannot load the prompt set .*HF_HUB_OFFLINE") as error:
        read_prompt_set(f"gsm8k:hf:nobody/{tmp_path.name}")
    assert "\n" not in str(error.value)
    (tmp_path / "x.jsonl.gz").write_bytes(b"not gzip")
    with pytest.raises(DataError, match="cannot read the prompt set"):
        read_prompt_set(f"humaneval:{tmp_path / 'x.jsonl.gz'}")
    with pytest.raises(DataError, match="is empty"):
        read_prompt_set(f"mtbench2:{write(tmp_path / 'q.jsonl', sample('mtbench')[0])}")
