"""Text to ids and back, in the shapes of NVIDIA's `preprocessing` and `postprocessing`."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tests.support.repositories import END_ID, byte_tokenizer, emulated_spec, write_emulated
from tokenrouter.assembly import Entry
from tokenrouter.errors import InvalidRequest
from tokenrouter.repository import Repository
from tokenrouter.triton.inputs import read_word_ids, word_ids
from tokenrouter.triton.tensors import PREPROCESSING_OUTPUTS

TOKENIZER = byte_tokenizer()


@pytest.fixture
def works(triton: ModuleType) -> Any:
    from tokenrouter.triton import text_models

    return text_models.WORKS


@pytest.fixture
def entry(tmp_path: Path) -> Entry:
    repository = Repository(write_emulated(tmp_path, emulated_spec()))
    return Entry(repository.entry(), repository)


def texts(*rows: list[str]) -> np.ndarray:
    return np.array([[word.encode() for word in row] for row in rows], np.object_)


def ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text).ids)


def test_prompts_of_different_length_are_padded_at_the_end(works: Any, entry: Entry) -> None:
    lengths = np.array([[7], [9]], np.int32)
    words = texts(["a", "bc"], ["", "d"])
    done = works["preprocessing"](
        entry,
        {
            "QUERY": texts(["hello"], ["hé"]),
            "REQUEST_OUTPUT_LEN": lengths,
            "STOP_WORDS_DICT": words,
            "BAD_WORDS_DICT": texts(["xy"], [""]),
            "PAD_ID": np.array([[3], [4]], np.int32),
        },
    )
    assert done.keys() == PREPROCESSING_OUTPUTS.keys()
    assert done["INPUT_ID"].tolist() == [ids("hello"), [*ids("hé"), 4, 4]]
    assert done["REQUEST_INPUT_LEN"].tolist() == [[5], [3]]
    assert (done["OUT_END_ID"].tolist(), done["OUT_PAD_ID"].tolist()) == ([[END_ID], [END_ID]], [[3], [4]])
    assert (done["REQUEST_OUTPUT_LEN"] == lengths).all()
    stop = [read_word_ids("stop_words_list", row.reshape(-1).tolist()) for row in done["STOP_WORDS_IDS"]]
    assert stop == [[ids("a"), ids("bc")], [ids("d")]]
    bad = [read_word_ids("bad_words_list", row.reshape(-1).tolist()) for row in done["BAD_WORDS_IDS"]]
    assert ids("xy") in bad[0]
    assert bad[1] == []


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        ({"REQUEST_OUTPUT_LEN": np.array([[1]])}, "QUERY is missing"),
        ({"QUERY": texts(["a"])}, "REQUEST_OUTPUT_LEN is missing"),
        ({"QUERY": texts([""]), "REQUEST_OUTPUT_LEN": np.array([[1]])}, "text_input is empty"),
        ({"QUERY": np.array([[b"\xff"]], np.object_)}, "QUERY is not valid UTF-8"),
    ],
)
def test_a_prompt_that_the_entry_model_would_not_take(works: Any, entry: Entry, inputs: Any, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        works["preprocessing"](entry, inputs)


def test_ids_become_text_without_special_tokens_and_padding(works: Any, entry: Entry) -> None:
    tokens = np.array([[[*ids("hé"), END_ID, 7]], [[*ids("abc"), 7, 7]]], np.int32)
    done = works["postprocessing"](entry, {"TOKENS_BATCH": tokens, "SEQUENCE_LENGTH": np.array([[4], [3]], np.int32)})
    assert done["OUTPUT"].tolist() == ["hé".encode(), b"abc"]


def test_ids_that_are_none_are_refused(works: Any, entry: Entry) -> None:
    inputs = {"TOKENS_BATCH": np.array([[[1, 999]]], np.int32), "SEQUENCE_LENGTH": np.array([[2]], np.int32)}
    with pytest.raises(InvalidRequest, match=r"TOKENS_BATCH holds 1\.\.999; token ids lie in 0\.\.256"):
        works["postprocessing"](entry, inputs)


@pytest.mark.parametrize("words", [[], [[1]], [[1, 2], [3]], [[0], [0, 0], [5, 6, 7]]], ids=str)
def test_word_lists_are_read_as_they_are_written(words: list[list[int]]) -> None:
    assert read_word_ids("x", word_ids(words).reshape(-1).tolist()) == words


@pytest.mark.parametrize("values", [[1, 2, 3, -1], [1, 2, 0, 2], [1, 2, 2, 1], [-1, 2, 1, 2]], ids=str)
def test_a_word_list_that_is_none_is_refused_by_name(values: list[int]) -> None:
    with pytest.raises(InvalidRequest, match="stop_words_list ends a word at"):
        read_word_ids("stop_words_list", values)
