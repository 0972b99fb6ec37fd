"""Distilling a shallow model, on a tiny random one: answers, loss, training, and the file of layers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from tokenrouter.engines.torch.config import TorchEngineConfig
from tokenrouter.engines.torch.engine import TorchEngine
from tools.demo_models.task import Split
from tools.errors import CommandError
from tools.progress import LateProgress
from tools.smollm2.answers import TOP, Answer, Writer, load_folder, save
from tools.smollm2.checkpoints import Checkpoint
from tools.smollm2.distil import Distillation, Recipe, batches, loss_of, rate_factor
from tools.smollm2.layers import EMBEDDING, read_layers, shallow, with_layers, write_layers
from tools.smollm2.prompts import prompts
from tools.smollm2.texts import fit_of, hidden_of, pack

VOCABULARY = 96
END = 2
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14], [15, 16]]
RECIPE = Recipe(steps=24, layers=(0, 2), batch_size=2, warmup_steps=4, rate=3e-3, sampled=16)


@pytest.fixture(scope="module")
def large() -> Checkpoint:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, tie_word_embeddings=True, initializer_range=0.2, eos_token_id=END,
        max_position_embeddings=128, dtype="float32",
    )  # fmt: skip
    tensors = {name: value.detach() for name, value in LlamaForCausalLM(config).state_dict().items()}
    return Checkpoint(config, {name: value for name, value in tensors.items() if name != "lm_head.weight"})


@pytest.fixture(scope="module")
def engine(large: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> TorchEngine:
    folder = tmp_path_factory.mktemp("large")
    large.model().save_pretrained(folder)
    return TorchEngine.from_folder(folder, TorchEngineConfig(device="cpu", max_batch_size=4, max_num_tokens=8))


@pytest.fixture(scope="module")
def written(engine: TorchEngine) -> list[Answer]:
    return Writer(engine, end=END, max_tokens=12, temperature=0).write(PROMPTS, seed=0)


class _Interrupted(LateProgress):
    """Ctrl-C half-way."""

    def __call__(self, stage: str, share: float) -> None:
        if share > 0.5:
            raise KeyboardInterrupt


def texts(answers: list[Answer]) -> list[tuple[Tensor, Tensor]]:
    return [(answer.prompt, answer.tokens) for answer in answers]


def test_prompts_are_on_one_side_each() -> None:
    train, held_out = prompts(Split.TRAIN), prompts(Split.HELD_OUT)
    assert not set(train) & set(held_out)
    assert len(train) > 3000
    assert len(held_out) > 200
    assert "{" not in "".join(train + held_out)


def test_answers_are_those_of_transformers(large: Checkpoint, written: list[Answer]) -> None:
    model = large.model()
    for prompt, answer in zip(PROMPTS, written, strict=True):
        ids = torch.tensor([prompt])
        expected = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=END,
            pad_token_id=0,
        )[0, len(prompt) :]
        assert answer.tokens.tolist() == expected.tolist()
        logits = model(torch.cat([ids, expected[None]], 1)).logits[0, len(prompt) - 1 : -1]
        best = logits.log_softmax(-1).topk(TOP)
        assert (answer.log_probs - best.values).abs().max() < 1e-2  # float16
        assert answer.candidates[:, 0].tolist() == best.indices[:, 0].tolist()


def test_sampled_answers_depend_on_their_seed_alone(engine: TorchEngine) -> None:
    writer = Writer(engine, end=END, max_tokens=12, temperature=1.0)
    one, other, again = (writer.write(PROMPTS, seed=seed) for seed in (1, 2, 1))
    assert [a.tokens.tolist() for a in one] == [a.tokens.tolist() for a in again]
    assert [a.tokens.tolist() for a in one] != [a.tokens.tolist() for a in other]


def test_answers_are_read_back_and_a_folder_without_any_is_refused(tmp_path: Path, written: list[Answer]) -> None:
    with pytest.raises(CommandError, match="has no answers"):
        load_folder(tmp_path)
    save(written, tmp_path / "a.pt")
    assert [a.log_probs.tolist() for a in load_folder(tmp_path)] == [a.log_probs.tolist() for a in written]


def test_the_large_model_would_choose_its_own_answers(large: Checkpoint, written: list[Answer]) -> None:
    fit = fit_of(large.model(), texts(written), size=3)
    assert fit.agreement == 1.0
    surprise = torch.cat([answer.log_probs[:, 0].float() for answer in written]).mean()
    assert fit.perplexity == pytest.approx(float((-surprise).exp()), rel=1e-2)


@torch.no_grad()
def test_with_the_whole_vocabulary_the_loss_is_torch_s(large: Checkpoint, written: list[Answer]) -> None:
    """The reference is torch's kl_div over all tokens, with a large model that is sure of its candidates."""
    model = shallow(large, (0, 2)).model()
    hidden = hidden_of(model, pack(texts(written)))
    theirs = torch.full((len(hidden), VOCABULARY), -30.0)
    candidates = torch.cat([answer.candidates for answer in written]).long()
    theirs.scatter_(1, candidates, torch.cat([answer.log_probs for answer in written]).float())
    expected = functional.kl_div(
        model.lm_head(hidden).log_softmax(-1), theirs.log_softmax(-1), log_target=True, reduction="batchmean"
    )
    generator = torch.Generator().manual_seed(0)
    embedding = large.tensors[EMBEDDING]
    exact = loss_of(hidden, written, embedding, VOCABULARY, generator)
    assert float(exact) == pytest.approx(float(expected), rel=1e-4)


@torch.no_grad()
def test_a_sample_of_the_other_tokens_stands_for_all_of_them(large: Checkpoint, written: list[Answer]) -> None:
    hidden = hidden_of(shallow(large, (0, 2)).model(), pack(texts(written[:1])))
    generator, embedding = torch.Generator().manual_seed(0), large.tensors[EMBEDDING]
    exact = float(loss_of(hidden, written[:1], embedding, VOCABULARY, generator))
    estimates = [float(loss_of(hidden, written[:1], embedding, 24, generator)) for _ in range(300)]
    assert sum(estimates) / len(estimates) == pytest.approx(exact, rel=0.1)


def test_every_answer_occurs_once_a_round(written: list[Answer]) -> None:
    stream = batches(written, 3, seed=0)
    first_round = [*next(stream), *next(stream)]
    assert {id(answer) for answer in first_round} == {id(answer) for answer in written}


def test_the_rate_rises_stays_and_falls_to_nothing() -> None:
    recipe = replace(RECIPE, steps=100, warmup_steps=10, decay=0.5)
    factors = [rate_factor(recipe, step) for step in range(100)]
    assert factors[0] == pytest.approx(0.1)
    assert factors[9:51] == [1.0] * 42
    assert factors[75] == pytest.approx(0.5)
    assert 0 < factors[99] < 0.03


def test_training_brings_the_shallow_model_nearer_and_can_go_on_where_it_stopped(
    large: Checkpoint, written: list[Answer], tmp_path: Path
) -> None:
    before = {name: tensor.clone() for name, tensor in large.tensors.items()}
    whole = Distillation(large, written, RECIPE)
    start = fit_of(whole.model, texts(written)).perplexity
    with LateProgress() as report:
        whole.run(report, tmp_path / "whole.draft", every=10)
        assert fit_of(whole.model, texts(written)).perplexity < 0.7 * start
    with pytest.raises(KeyboardInterrupt):
        Distillation(large, written, RECIPE).run(_Interrupted(), tmp_path / "a.draft", every=5)
    with LateProgress() as report:
        resumed = Distillation(large, written, RECIPE)
        resumed.run(report, tmp_path / "a.draft", every=5)
    assert resumed.step == RECIPE.steps
    for name, tensor in whole.own().items():
        torch.testing.assert_close(resumed.own()[name], tensor)
    assert all(torch.equal(before[name], tensor) for name, tensor in large.tensors.items())


def test_the_file_of_layers_gives_the_model_back(large: Checkpoint, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="installed with requirements/smollm2.lock")
    start = shallow(large, (0, 2))
    own = {name: tensor for name, tensor in start.tensors.items() if name != EMBEDDING}
    write_layers(own, tmp_path / "small.gguf")
    again = with_layers(large, read_layers(tmp_path / "small.gguf"))
    assert again.config.num_hidden_layers == 2
    assert again.tensors.keys() == start.tensors.keys()
    for name, tensor in start.tensors.items():
        # Q8_0 has 127 steps to the largest of 32 weights.
        torch.testing.assert_close(again.tensors[name], tensor, rtol=0, atol=float(tensor.abs().max()) / 200)
