"""Tests of the demo task, its tokenizer, its training loop and the checkpoints that ship with the repository."""

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from tests.support.commands import run
from tools.demo_models.__main__ import PROBLEM_COUNT, PROBLEMS_PATH, app
from tools.demo_models.evaluate import accuracy, complete, load_model, load_tokenizer
from tools.demo_models.task import (
    MAX_VALUE,
    Problem,
    Split,
    check,
    dump_problems,
    extract_answer,
    generate_problems,
    load_problems,
    split_of,
)
from tools.demo_models.tokenizer import (
    END_OF_TEXT,
    END_OF_TEXT_ID,
    PAD,
    PAD_ID,
    RESERVED,
    build_tokenizer,
    save_tokenizer,
)
from tools.demo_models.train import (
    RECIPES,
    build_model,
    loss_of,
    parameter_count,
    rate_factor,
    save_checkpoint,
    train,
    training_batches,
)
from tools.errors import CommandError

ROOT = Path(__file__).resolve().parents[2]
CHECKPOINTS = {name: ROOT / "model_repository" / name / "1" for name in RECIPES}
CHECKPOINT_FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}
MAX_CHECKPOINT_BYTES = 10_000_000
TINY = replace(RECIPES["small"], hidden_size=32, intermediate_size=64, num_heads=1, steps=8, batch_size=8)


def test_equal_seeds_give_equal_problems_and_different_seeds_do_not() -> None:
    def draw(seed: int) -> list[str]:
        return [problem.prompt for problem in islice(generate_problems(Split.TRAIN, seed), 50)]

    assert draw(3) == draw(3)
    assert draw(3) != draw(4)


def test_splits_are_disjoint_whatever_the_seed() -> None:
    for split in Split:
        for seed in range(5):
            assert all(split_of(p.prompt) is split for p in islice(generate_problems(split, seed), 100))


def test_reference_solutions_are_right_and_within_range() -> None:
    operations = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
    for problem in islice(generate_problems(Split.TRAIN, 0), 500):
        # The prompt alone decides the answer: recompute it from there.
        start, steps = problem.prompt.removeprefix("Start ").removesuffix(" =").split(": ")
        value = int(start)
        for step in steps.split(", "):
            value = operations[step[0]](value, int(step[1:]))
            assert 0 <= value <= MAX_VALUE
        assert problem.answer == str(value)
        assert check(problem.prompt, problem.completion, problem.answer)


def test_lengths_are_as_documented() -> None:
    tokenizer = build_tokenizer()
    for problem in islice(generate_problems(Split.HELD_OUT, 0), 300):
        assert 15 <= len(tokenizer.encode(problem.prompt).ids) <= 45
        assert 20 <= len(tokenizer.encode(problem.completion).ids) <= 90


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("\n1+2=3\n#### 3", "3"),
        ("#### 3", "3"),
        ("#### 3\n", "3"),
        ("####3", "3"),
        ("####  3  \r\n", "3"),
        ("1+2=3\n#### 3\nand more\n#### 4", "3"),  # the first mark counts
        ("Start 1: +2 =\n1+2=3\n#### 3", "3"),  # an echoed prompt is skipped
        ("#### 03", "03"),  # not the number as a person would write it: extracted, but not equal to "3"
        ("", None),
        ("3", None),
        ("####", None),
        ("#### ", None),
        ("####\n3", None),
        ("#### three", None),
        ("#### 3 4", None),
        ("#### 3.5", None),
        ("#### -3", None),
        ("### 3", None),
        ("result #### 3", None),
        ("#### ٣", None),  # a digit, but no ASCII digit
        ("\ufffd\x00#### 3", None),
    ],
)
def test_answers_are_extracted_from_any_text(completion: str, expected: str | None) -> None:
    prompt = "Start 1: +2 ="
    assert extract_answer(prompt, completion) == expected
    assert check(prompt, completion, "3") is (expected == "3")


def test_problem_files_round_trip(tmp_path: Path) -> None:
    problems = [Problem('a "quoted" ü\u2028', "1"), Problem("b", "2")]
    path = tmp_path / "problems.jsonl"
    path.write_text(dump_problems(problems), encoding="utf-8")
    assert load_problems(path) == problems


@pytest.mark.parametrize("line", ["{", "[]", '"text"', "3", '{"prompt": "p"}', '{"answer": "1"}'])
def test_a_malformed_problem_file_is_reported_with_its_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "problems.jsonl"
    path.write_text(f'{{"prompt": "p", "answer": "1"}}\n{line}\n', encoding="utf-8")
    with pytest.raises(CommandError, match=r"problems\.jsonl:2: expected an object"):
        load_problems(path)


def test_the_shipped_problems_are_what_the_command_writes(tmp_path: Path) -> None:
    output = tmp_path / "problems.jsonl"
    result = run(app, "problems", "--output", output)
    assert result.exit_code == 0, result.output
    shipped = ROOT / PROBLEMS_PATH
    assert output.read_bytes() == shipped.read_bytes()
    problems = load_problems(shipped)
    assert len({p.prompt for p in problems}) == len(problems) == PROBLEM_COUNT
    assert all(split_of(p.prompt) is Split.HELD_OUT for p in problems)
    assert all(set(json.loads(line)) == {"prompt", "answer"} for line in shipped.read_text().splitlines())


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "  two  spaces , kept",
        "Start 1: +2 =\n",
        "naïve 中文 עברית 🙂👩‍👩‍👧",
        "\x00\x7f\t\r\n",
        "\u2028\ufeff",
        "''s n't",
    ],
)
def test_any_text_round_trips_one_token_per_byte(text: str) -> None:
    tokenizer = build_tokenizer()
    ids = tokenizer.encode(text).ids
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text


def test_every_code_point_round_trips() -> None:
    tokenizer = build_tokenizer()
    text = "".join(chr(point) for point in range(0, 0x110000, 37) if not 0xD800 <= point < 0xE000)
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_special_tokens_have_the_announced_ids() -> None:
    tokenizer = build_tokenizer()
    assert tokenizer.token_to_id(END_OF_TEXT) == END_OF_TEXT_ID
    assert tokenizer.token_to_id(PAD) == PAD_ID
    assert tokenizer.encode(END_OF_TEXT).ids == [END_OF_TEXT_ID]
    assert [tokenizer.token_to_id(token) for token in RESERVED] == [258, 259, 260, 261]
    assert tokenizer.get_vocab_size() == 262


def test_transformers_loads_the_tokenizer_and_agrees(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "Start 47: *6 =\n47*6=282 , ü 🙂"
    assert loaded(text)["input_ids"] == build_tokenizer().encode(text).ids  # no token is added
    assert loaded.decode(loaded(text)["input_ids"]) == text
    assert (loaded.eos_token_id, loaded.pad_token_id, loaded.bos_token_id) == (END_OF_TEXT_ID, PAD_ID, None)


def test_the_loss_covers_the_completion_and_the_end_token_only() -> None:
    batch = next(training_batches(TINY))
    problems = {p.prompt: p for p in islice(generate_problems(Split.TRAIN, TINY.seed), 2000)}
    tokenizer = build_tokenizer()
    for ids, targets in zip(batch.input_ids.tolist(), batch.targets.tolist(), strict=True):
        text = tokenizer.decode(ids)
        problem = next(p for prompt, p in problems.items() if text.startswith(prompt))
        learned = [token for token in targets if token != -100]
        assert tokenizer.decode(learned[:-1]) == problem.completion
        assert learned[-1] == END_OF_TEXT_ID
        # Position i predicts token i + 1.
        first = targets.index(learned[0])
        assert first == len(problem.prompt) - 1
        assert ids[first + 1] == learned[0]


def test_learning_rates_warm_up_and_decay() -> None:
    recipe = replace(TINY, steps=1000, warmup_steps=100)
    assert rate_factor(recipe, 0) == pytest.approx(0.01)
    assert rate_factor(recipe, 99) == rate_factor(recipe, 100) == 1.0
    assert rate_factor(recipe, 550) == pytest.approx(0.5)
    assert rate_factor(recipe, 999) < 1e-4


def test_a_few_steps_lower_the_loss_and_repeat_exactly() -> None:
    batch = next(training_batches(replace(TINY, seed=9)))
    before = loss_of(build_model(TINY), batch).item()
    after = loss_of(train(TINY), batch).item()
    repeated = loss_of(train(TINY), batch).item()
    assert after < before - 0.3
    assert repeated == after


def test_a_saved_checkpoint_loads_and_holds_nothing_else(tmp_path: Path) -> None:
    model = build_model(TINY)
    save_checkpoint(model, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == CHECKPOINT_FILES
    loaded = load_model(tmp_path)
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(loaded(input_ids=ids).logits, model(input_ids=ids).logits)


def test_batched_decoding_does_not_depend_on_the_neighbours() -> None:
    model = build_model(TINY)
    tokenizer = build_tokenizer()
    prompts = ["Start 1: +2 =", "a", "Start 47: *6, -195, +388 ="]
    together = complete(model, tokenizer, prompts)
    alone = [complete(model, tokenizer, [prompt])[0] for prompt in prompts]
    assert together == alone


def test_an_unknown_model_name_is_a_usage_error(tmp_path: Path) -> None:
    result = run(app, "train", "--output", tmp_path, "--only", "medium")
    assert result.exit_code == 2


def test_shipped_checkpoints_are_complete_and_small() -> None:
    total = 0
    for folder in CHECKPOINTS.values():
        assert {path.name for path in folder.iterdir()} >= CHECKPOINT_FILES
        total += sum((folder / name).stat().st_size for name in CHECKPOINT_FILES)
    assert total <= MAX_CHECKPOINT_BYTES


def test_shipped_checkpoints_share_one_tokenizer() -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        small, large = ((folder / name).read_bytes() for folder in CHECKPOINTS.values())
        assert small == large
    assert load_tokenizer(CHECKPOINTS["small"]).to_str() == build_tokenizer().to_str()


@pytest.mark.parametrize(("name", "low", "high"), [("small", 0.2, 0.8), ("large", 0.9, 1.0)])
def test_shipped_models_are_as_good_as_announced(name: str, low: float, high: float) -> None:
    """A sample of the problems: a coarse guard against a wrong or stale file; `evaluate` measures exactly."""
    model = load_model(CHECKPOINTS[name])
    assert parameter_count(model) == parameter_count(build_model(RECIPES[name]))
    problems = load_problems(ROOT / PROBLEMS_PATH)[:64]
    assert low <= accuracy(model, load_tokenizer(CHECKPOINTS[name]), problems) <= high
