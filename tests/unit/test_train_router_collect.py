"""Collecting with tiny random models: decoding and features against transformers, labels against the rules."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import commands
from tokenrouter.engines.torch.config import KvCacheConfig, TorchEngineConfig
from tokenrouter.engines.torch.engine import TorchEngine
from tokenrouter.engines.torch.loading import load_model
from tokenrouter.policies.checkpoints import load_router
from tools.demo_models.tokenizer import END_OF_TEXT_ID
from tools.demo_models.train import RECIPES, build_model, save_checkpoint
from tools.train_router.__main__ import app
from tools.train_router.collect import Collector, Task
from tools.train_router.corpus import Corpus
from tools.train_router.decoding import greedy
from tools.train_router.features import Text, read
from tools.train_router.pair import Pair
from tools.train_router.problems import Example, demo_examples

TINY = replace(RECIPES["small"], hidden_size=32, intermediate_size=48, num_layers=1, num_heads=1)
PREFIXES = [[7], [1, 2, 3], [9] * 40, [4, 5], [6, 6, 6, 200]]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    root = tmp_path_factory.mktemp("pair")
    for seed, name in enumerate(("small", "large")):
        save_checkpoint(build_model(replace(TINY, seed=seed)), root / name)
    return Pair(root / "small", root / "large", batch=4, device="cpu")


def model_of(folder: Path) -> Any:
    return load_model(folder, dtype=torch.float32, device=torch.device("cpu"))


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(TorchEngineConfig(max_batch_size=8), id="all-at-once"),
        pytest.param(TorchEngineConfig(max_batch_size=2, max_num_tokens=7), id="prefixes-in-pieces"),
        pytest.param(TorchEngineConfig(kv_cache_config=KvCacheConfig(max_tokens=64)), id="kv-for-one"),
    ],
)
def test_greedy_decoding_is_that_of_transformers(pair: Pair, config: TorchEngineConfig) -> None:
    model, engine = model_of(pair.small), TorchEngine.from_folder(pair.small, config)
    done: list[int] = []
    found = greedy(engine, PREFIXES, max_tokens=12, end_ids={END_OF_TEXT_ID}, progress=done.append)
    for prefix, tokens in zip(PREFIXES, found, strict=True):
        ids = torch.tensor([prefix])
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, pad_token_id=0
        )
        assert tokens == output[0, len(prefix) :].tolist()
    assert sum(done) == len(PREFIXES)
    assert engine.blocks_leased == 0


def test_decoding_ends_at_an_end_id_and_at_the_longest_sequence(pair: Pair) -> None:
    engine = TorchEngine.from_folder(pair.small, TorchEngineConfig(max_seq_len=48))
    (free,) = greedy(engine, [[9] * 40], max_tokens=100, end_ids=())
    assert len(free) == 8
    (stopped,) = greedy(engine, [[9] * 40], max_tokens=100, end_ids={free[2]})
    assert stopped == free[: free.index(free[2]) + 1]


def test_features_are_those_of_each_text_alone(pair: Pair) -> None:
    model = model_of(pair.small)
    texts = [Text([1, 2, 3], [4, 5]), Text([9], [8, 7, 6, 5]), Text([1] * 30, [2])]
    found = read(model, texts, top=100)
    rows = []
    for text in texts:
        output = model(torch.tensor([text.prompt + text.answer]), output_hidden_states=True)
        rows.append((output.logits[0], output.hidden_states[-1][0], slice(len(text.prompt) - 1, -1)))
    logits = torch.cat([row[part] for row, _, part in rows])
    torch.testing.assert_close(found.hidden, torch.cat([state[part] for _, state, part in rows]))
    torch.testing.assert_close(found.top_logits, logits.topk(100).values)
    assert found.token.tolist() == logits.argmax(-1).tolist()


def test_r2r_rows_are_the_large_models_right_answers_and_mismatches_are_continued(pair: Pair) -> None:
    examples = [Example(f"question {i}", str(i % 2)) for i in range(12)]
    verdicts: list[str] = []

    def checker(prompt: str, completion: str, answer: str) -> bool:
        verdicts.append(completion)
        return answer == "1"

    collector = Collector(pair, Task(examples, checker, "large", max_tokens=6))
    answers = collector.answers()
    assert [answers.large_right[i] for i in range(4)] == [False, True, False, True]
    # Random models repeat themselves and do not end, so the answers are written here.
    answers = replace(answers, large=[[*range(i, i + 5), END_OF_TEXT_ID] for i in range(12)])
    verdicts.clear()
    corpus = collector.run(answers)
    assert sorted(set(corpus.example.tolist())) == [1, 3, 5, 7, 9, 11]
    assert len(corpus.target) == 6 * 6
    wrong = (corpus.small_token != corpus.target) & (corpus.target != END_OF_TEXT_ID)
    assert wrong.any()
    # One verdict per mismatch and one per roll-out; the checker is content with each, so nothing diverges.
    both = (corpus.small_token != corpus.target) & (corpus.large_token != corpus.target)
    assert len(verdicts) == int(wrong.sum()) + int(both.sum())
    assert corpus.divergent.tolist() == [0] * 36
    assert set(corpus.sufficient[both].tolist()) == {1}


def test_a_continuation_that_says_the_same_is_not_divergent(pair: Pair) -> None:
    collector = Collector(pair, Task([Example("q")], None, "large", sentence=20))
    encode = collector.tokenizer.encode
    answer = encode("so x = 2. And on").ids
    assert not collector.diverges(0, answer, 3, encode("X=2. But then").ids)
    assert collector.diverges(0, answer, 3, encode("x = 3. And on").ids)


def test_with_a_checker_the_continued_answer_decides(pair: Pair) -> None:
    collector = Collector(pair, Task([Example("q", "4")], lambda p, text, answer: text.endswith(answer), "large"))
    encode = collector.tokenizer.encode
    answer = encode("1+3=4").ids
    assert not collector.diverges(0, answer, 2, encode("4=4").ids)
    assert collector.diverges(0, answer, 2, encode("4=5").ids)


def test_reference_texts_end_and_get_no_divergence_labels(pair: Pair) -> None:
    examples = [*demo_examples(4, seed=1), Example("no text", "1")]
    corpus = Collector(pair, Task(examples, lambda *_: True, "gold", max_tokens=4)).run()
    assert sorted(set(corpus.example.tolist())) == [0, 1, 2, 3]
    assert int((corpus.target == END_OF_TEXT_ID).sum()) == 4
    wrong = corpus.small_token != corpus.target
    assert set(corpus.divergent[wrong & (corpus.target != END_OF_TEXT_ID)].tolist()) == {-1}
    both = wrong & (corpus.large_token != corpus.target)
    # The checker is content with every roll-out.
    assert set(corpus.sufficient[both].tolist()) == {1}
    assert set(corpus.sufficient[wrong & ~both].tolist()) <= {0}


def test_the_command_line_collects_and_trains(pair: Pair, tmp_path: Path) -> None:
    problems = tmp_path / "problems.jsonl"
    lines = [{"prompt": f"q{i}", "answer": "1", "completion": f"a{i}. b"} for i in range(20)]
    problems.write_text("\n".join(map(json.dumps, lines)))

    def run(*arguments: object) -> str:
        result = commands.run(app, *arguments)
        assert result.exit_code == 0, result.output
        return result.output

    data = tmp_path / "data"
    files = ("--small", pair.small, "--large", pair.large, "--problems", problems, "--output", data)
    output = run("collect", *files, "--text", "gold", "--checker", "none", "--max-tokens", 5)
    assert "20 of 20 texts" in output
    corpus = Corpus.load(data)
    assert corpus.facts.large_right == [None] * 20
    # Random models agree with nothing; give the trainers both classes.
    rows = torch.arange(len(corpus.target)) % 2
    replace(
        corpus,
        sufficient=rows.to(torch.int8),
        small_token=torch.where(rows == 1, corpus.target, 0),
        large_token=corpus.target,
    ).save(data)
    for kind in ("citer", "collm"):
        out = tmp_path / f"{kind}.safetensors"
        assert "validation loss" in run(kind, "--data", data, "--output", out, "--epochs", 1)
        assert run("threshold", out, "--value", 0.25) == f"{out}: threshold 0.250000\n"
        assert load_router(out, kind).threshold == 0.25


def test_two_tokenizers_are_refused(pair: Pair, tmp_path: Path) -> None:
    save_checkpoint(build_model(TINY), tmp_path)
    text = (tmp_path / "tokenizer.json").read_text().replace("<|reserved_0|>", "<|other|>")
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(Exception, match="different tokenizers"):
        Collector(replace(pair, large=tmp_path), Task([Example("q")], None))
