from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from lightning_rlhf.data import JSONLPrompts, ListPrompts, Prompt, ReasoningGymPrompts

H05_LINES = [
    '{"prompt": "one?", "answer": "1", "level": 3}',
    '{"prompt": "two?", "ans',
    "   ",
    '{"prompt": "four?"}',
    '["prompt", "answer"]',
    '{"prompt": [{"role": "user", "content": "six?"}], "answer": "6"}',
]


def write(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def test_h05_strict_names_file_line_and_reason(tmp_path: Path) -> None:
    path = write(tmp_path / "bad.jsonl", H05_LINES)
    with pytest.raises(ValueError, match=r"bad\.jsonl, line 2: not valid JSON \(Unterminated string.*column 20\)"):
        JSONLPrompts(path).load()


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"prompt": "four?"}', r"line 2: no key 'answer' \(the row has 'prompt'\)"),
        ('["prompt", "answer"]', "line 2: expected a JSON object, got a list"),
        ('{"answer": "1"}', "line 2: no key 'prompt'"),
        ('{"prompt": 5, "answer": "1"}', "line 2: key 'prompt': expected a string or a list"),
        ('{"prompt": "", "answer": "1"}', "line 2: key 'prompt': the prompt is empty"),
        ('{"prompt": [], "answer": "1"}', "line 2: key 'prompt': the chat has no messages"),
        ('{"prompt": [{"role": "user"}], "answer": "1"}', "line 2: .* chat message 0: 'content' must be a string"),
        ('{"prompt": "a", "answer": NaN}', r"line 2: not valid JSON \(NaN is no JSON value\)"),
        ("[" * 100_000, r"line 2: not valid JSON \(nested too deeply\)"),
    ],
)
def test_h05_strict_reasons(tmp_path: Path, line: str, reason: str) -> None:
    path = write(tmp_path / "bad.jsonl", [H05_LINES[0], line])
    with pytest.raises(ValueError, match=reason):
        JSONLPrompts(path).load()


def test_h05_bytes_that_are_not_utf8_are_named_with_their_line(tmp_path: Path) -> None:
    path = tmp_path / "latin.jsonl"
    path.write_bytes(H05_LINES[0].encode() + b'\n{"prompt": "caf\xe9", "answer": 1}\n')
    with pytest.raises(ValueError, match=r"latin\.jsonl, line 2: not UTF-8"):
        JSONLPrompts(path).load()


def test_h05_skip_keeps_good_rows_in_order_and_names_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = JSONLPrompts(write(tmp_path / "bad.jsonl", H05_LINES), on_error="skip")
    with caplog.at_level(logging.WARNING):
        prompts = source.load()
    assert [prompt.uid for prompt in prompts] == ["bad.jsonl:1", "bad.jsonl:6"]
    assert prompts[0].metadata == {"answer": "1", "level": 3}
    assert prompts[1].text == "six?"
    assert list(source.skipped_lines) == [2, 4, 5]
    assert "skipped 3 of 5 rows" in caplog.text
    assert "line 2: " in caplog.text
    assert "line 4: " in caplog.text
    assert "line 5: " in caplog.text
    assert [prompt.uid for prompt in source.load()] == ["bad.jsonl:1", "bad.jsonl:6"]
    assert list(source.skipped_lines) == [2, 4, 5]


def test_h05_no_good_row_is_an_error(tmp_path: Path) -> None:
    for name, lines in (("empty.jsonl", [""]), ("bad.jsonl", H05_LINES[1:5])):
        with pytest.raises(ValueError, match=f"{name} holds no usable prompt"):
            JSONLPrompts(write(tmp_path / name, lines), on_error="skip").load()


def test_jsonl_uid_key_required_keys_and_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"q": "a", "id": 7}\n{"q": "b", "id": "x"}')
    prompts = JSONLPrompts(path, prompt_key="q", uid_key="id", required_keys=()).load()
    assert [(p.uid, p.prompt, p.metadata) for p in prompts] == [("7", "a", {}), ("x", "b", {})]
    with pytest.raises(ValueError, match="line 1: key 'name' must be a string or an integer, got None"):
        JSONLPrompts(path, prompt_key="q", uid_key="name", required_keys=()).load()


def test_repeated_uids_are_named(tmp_path: Path) -> None:
    rows = [json.dumps({"prompt": "p", "answer": 1, "id": uid}) for uid in ("a", "b", "a", "c", "c")]
    path = write(tmp_path / "a.jsonl", rows)
    with pytest.raises(ValueError, match="2 uids are used by more than one prompt: 'a', 'c'"):
        JSONLPrompts(path, uid_key="id").load()
    with pytest.raises(ValueError, match=r"1 uids .* 'x'"):
        ListPrompts([Prompt(uid="x", prompt="a"), Prompt(uid="x", prompt="b")]).load()


def test_missing_file_and_wrong_arguments(tmp_path: Path) -> None:
    source = JSONLPrompts(tmp_path / "none.jsonl")
    with pytest.raises(FileNotFoundError, match=r"none\.jsonl"):
        source.load()
    with pytest.raises(ValueError, match="on_error must be 'raise' or 'skip', got 'ignore'"):
        JSONLPrompts("a", on_error="ignore")
    with pytest.raises(TypeError, match="required_keys must be a list"):
        JSONLPrompts("a", required_keys="answer")


def test_list_prompts_and_text() -> None:
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    prompts = ListPrompts(["hello", chat, Prompt(uid="z", prompt="x", metadata={"answer": 1})]).load()
    assert [p.uid for p in prompts] == ["0", "1", "z"]
    assert [p.text for p in prompts] == ["hello", "system: be brief\nuser: hi", "x"]
    with pytest.raises(ValueError, match="no usable prompt"):
        ListPrompts([]).load()
    with pytest.raises(ValueError, match="Prompt 'e': the prompt is empty"):
        Prompt(uid="e", prompt="")


def test_reasoning_gym_entries_reach_the_real_verifier() -> None:
    import reasoning_gym

    source = ReasoningGymPrompts(
        "basic_arithmetic", size=5, seed=3, suffix=" Say only the number.", task_config={"max_terms": 2}
    )
    prompts = source.load()
    verifier = reasoning_gym.create_dataset("basic_arithmetic", size=5, seed=3, max_terms=2)
    assert [p.uid for p in prompts] == [f"basic_arithmetic-3-{i}" for i in range(5)]
    for index, prompt in enumerate(prompts):
        entry = prompt.metadata["entry"]
        assert entry == verifier[index]
        assert prompt.text == entry["question"] + " Say only the number."
        assert verifier.score_answer(entry["answer"], entry) == 1.0
        assert verifier.score_answer("no number", entry) < 1.0
    assert [p.text for p in source.load()] == [p.text for p in prompts]
    other = ReasoningGymPrompts("basic_arithmetic", size=5, seed=4, task_config={"max_terms": 2}).load()
    assert {p.metadata["entry"]["question"] for p in other} != {p.metadata["entry"]["question"] for p in prompts}


def test_reasoning_gym_entries_keep_tuples() -> None:
    import reasoning_gym

    entry = ReasoningGymPrompts("arc_agi", size=1, seed=7).load()[0].metadata["entry"]
    verifier = reasoning_gym.create_dataset("arc_agi", size=1, seed=7)
    assert verifier.score_answer(entry["answer"], entry) == 1.0
    assert verifier.score_answer(entry["answer"], json.loads(json.dumps(entry))) < 1.0


def test_reasoning_gym_says_what_it_refuses() -> None:
    with pytest.raises(ValueError, match="cannot make the task 'no_such_task' with its defaults"):
        ReasoningGymPrompts("no_such_task", size=1, seed=0).load()
    with pytest.raises(ValueError, match=r"cannot make the task 'basic_arithmetic' with \{'no_such': 1\}"):
        ReasoningGymPrompts("basic_arithmetic", size=1, seed=0, task_config={"no_such": 1}).load()
    with pytest.raises(ValueError, match="size must be at least 1, got 0"):
        ReasoningGymPrompts("basic_arithmetic", size=0, seed=0)
