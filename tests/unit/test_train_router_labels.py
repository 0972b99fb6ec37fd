"""Labels, threshold rules and measures of the router trainer on cases that are counted by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from perf.emulated.repository import byte_tokenizer
from tools.errors import CommandError
from tools.json_lines import read_json_lines
from tools.train_router import labels
from tools.train_router.corpus import held_back
from tools.train_router.fit import auc
from tools.train_router.problems import CHECKERS, Example, demo_examples, same_number
from tools.train_router.thresholds import GRID, by_recall, by_share

END = 9
#                      equal  large right  both wrong  end of text  small alone right
SMALL = torch.tensor([1, 2, 3, 4, 5])
LARGE = torch.tensor([1, 7, 8, 9, 6])
TARGET = torch.tensor([1, 7, 6, 9, 5])


def test_mismatches_are_other_tokens_except_where_the_text_ends() -> None:
    assert labels.mismatches(SMALL, TARGET, {END}).tolist() == [1, 2]


def test_divergent_is_0_where_tokens_agree_and_the_verdict_elsewhere() -> None:
    index = torch.tensor([1, 2, 4])
    assert labels.divergent(6, index, [True, False, None]).tolist() == [0, 1, 0, 0, -1, 0]


def test_citer_rolls_out_only_where_both_models_leave_the_text() -> None:
    index = labels.undecided(SMALL, LARGE, TARGET)
    assert index.tolist() == [2]
    assert labels.sufficient(SMALL, TARGET, index, [True]).tolist() == [1, 0, 1, 0, 1]
    assert labels.sufficient(SMALL, TARGET, index, [False]).tolist() == [1, 0, 0, 0, 1]
    assert labels.sufficient(SMALL, TARGET, index, [None]).tolist() == [1, 0, -1, 0, 1]


def test_collm_defers_where_the_large_model_is_right_and_the_small_one_is_not() -> None:
    assert labels.deferral(SMALL, LARGE, TARGET).tolist() == [0, 1, 0, 1, 0]


def test_the_large_model_wins_only_alone() -> None:
    assert labels.large_wins([True, True, False, False], [True, False, True, False]).tolist() == [0, 0, 1, 0]


def test_labels_of_no_rows() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    assert labels.mismatches(none, none, {END}).tolist() == []
    assert labels.divergent(0, none, []).tolist() == []


def test_sentences_end_at_stops_and_line_breaks() -> None:
    tokenizer = byte_tokenizer()
    ends = labels.sentence_ends(tokenizer)
    assert {tokenizer.decode([i]) for i in ends} == {".", "!", "?", "\n"}
    tokens = tokenizer.encode("ab. cd").ids
    assert tokenizer.decode(labels.until(tokens, ends, 100)) == "ab."
    assert tokenizer.decode(labels.until(tokens, ends, 2)) == "ab"
    assert labels.until([], ends, 5) == []


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [("So, x = 2.", "so x=2", True), ("So x = 2", "So x = 3", False), ("", "...", True), ("É", "é", True)],
)
def test_a_sentence_is_the_same_if_letters_and_digits_are(one: str, other: str, same: bool) -> None:
    assert labels.same_sentence(one, other) is same


@pytest.mark.parametrize(
    ("text", "answer", "right"),
    [
        ("so 1,204 it is", "1204", True),
        ("3 then 4.0", "4", True),
        ("3 then 5", "4", False),
        ("none", "4", False),
        ("4", "none", False),
    ],
)
def test_the_last_number_counts(text: str, answer: str, right: bool) -> None:
    assert same_number("", text, answer) is right


def test_the_recall_rule_takes_the_fewest_positives_that_find_enough() -> None:
    """Four positives at 0.2, 0.6, 0.8, 0.9 among negatives: all of them are found at 0.2 and below only."""
    probabilities = torch.tensor([0.2, 0.6, 0.8, 0.9, 0.1, 0.3, 0.5, 0.05])
    positive = torch.tensor([1, 1, 1, 1, 0, 0, 0, 0])
    threshold, recall, share = by_recall(probabilities, positive, 0.95)
    assert threshold == max(t for t in GRID if t <= 0.2)
    assert (recall, share) == (1.0, 6 / 8)
    threshold, recall, share = by_recall(probabilities, positive, 0.75)
    assert threshold == max(t for t in GRID if t <= 0.6)
    assert (recall, share) == (0.75, 3 / 8)


def test_the_recall_rule_falls_back_to_the_highest_recall() -> None:
    probabilities, positive = torch.tensor([0.001, 0.5, 0.7]), torch.tensor([1, 1, 0])
    threshold, recall, share = by_recall(probabilities, positive, 0.95)
    assert threshold == max(t for t in GRID if t <= 0.5)
    assert recall == 0.5
    assert share == pytest.approx(2 / 3)


@pytest.mark.parametrize("rising", [False, True])
def test_the_share_rule_inverts_a_known_curve(rising: bool) -> None:
    """Share 1 - t (or t) of a threshold t: the threshold for 0.3 is 0.7 (or 0.3)."""
    threshold, share = by_share(lambda t: t if rising else 1 - t, 0.3, rising=rising, steps=40, tolerance=1e-9)
    assert threshold == pytest.approx(0.3 if rising else 0.7, abs=1e-6)
    assert share == pytest.approx(0.3, abs=1e-6)


def test_the_share_rule_keeps_the_nearest_of_a_curve_with_a_jump() -> None:
    calls: list[float] = []

    def measure(threshold: float) -> float:
        calls.append(threshold)
        return 0.5 if threshold < 0.25 else 0.1

    threshold, share = by_share(measure, 0.2, rising=False, steps=12)
    assert share == 0.1
    assert threshold >= 0.25
    assert len(calls) == 12


def test_auc_counts_pairs() -> None:
    scores, positive = torch.tensor([0.1, 0.4, 0.4, 0.8]), torch.tensor([0.0, 1.0, 0.0, 1.0])
    # Pairs (positive, negative): 0.4>0.1, 0.4=0.4, 0.8>0.1, 0.8>0.4.
    assert auc(scores, positive) == pytest.approx(3.5 / 4)
    assert auc(-scores, positive) == pytest.approx(0.5 / 4)
    assert auc(scores, torch.ones(4)) == 0.5


def test_demo_problems_are_training_problems_and_their_texts_are_right() -> None:
    from tools.demo_models.task import Split, split_of

    examples = demo_examples(20, seed=5)
    assert examples == demo_examples(20, seed=5) != demo_examples(20, seed=6)
    for example in examples:
        assert split_of(example.prompt) is Split.TRAIN
        assert example.completion is not None
        assert example.answer is not None
        assert CHECKERS["demo"](example.prompt, example.completion, example.answer)


def test_problem_files(tmp_path: Path) -> None:
    file = tmp_path / "problems.jsonl"
    file.write_text(json.dumps({"prompt": "a"}) + "\n\n" + json.dumps({"prompt": "b", "answer": "1"}) + "\n")
    assert [(example.prompt, example.answer) for example in read_json_lines(file, Example)] == [("a", None), ("b", "1")]
    file.write_text(json.dumps({"prompt": "a"}) + "\n{}\n")
    with pytest.raises(CommandError, match="jsonl:2: expected"):
        read_json_lines(file, Example)


def test_the_validation_split_is_exact_and_repeatable() -> None:
    chosen = held_back(50, 0.2, seed=3)
    assert int(chosen.sum()) == math.ceil(10)
    assert torch.equal(chosen, held_back(50, 0.2, seed=3))
    assert not torch.equal(chosen, held_back(50, 0.2, seed=4))
