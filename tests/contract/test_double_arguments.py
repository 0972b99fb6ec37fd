"""What the double pins of constructors and parameters. Each behaviour is also broken once, see conftest.py."""

from __future__ import annotations

import inspect
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorrt_llm import LLM, SamplingParams
from tensorrt_llm._torch.models import modeling_utils
from tensorrt_llm._torch.models.modeling_qwen3 import Qwen3ForCausalLM
from tensorrt_llm.executor import RequestError
from tensorrt_llm.llmapi import KvCacheConfig, KvCacheRetentionConfig, TorchLlmArgs

from tests.contract.calls import (
    BLOCK,
    END,
    PROMPT,
    SMALL,
    STOP,
    VOCABULARY,
    build,
    finish,
    submit,
    tags,
)
from tests.contract.processors import CALLS, GATES, Gate, Record
from tokenrouter.engines.base import EngineRow
from tokenrouter.engines.tensorrt_llm import facts
from tokenrouter.engines.torch.config import KvCacheConfig as TorchKvCacheConfig
from tokenrouter.engines.torch.config import TorchEngineConfig
from tokenrouter.engines.torch.engine import TorchEngine


@pytest.mark.pins("unknown_arguments_refused")
def test_llm_refuses_unknown_arguments() -> None:
    with pytest.raises(ValueError, match="max_batchsize"):
        build(max_batchsize=3).shutdown()


def test_configuration_objects_refuse_unknown_fields() -> None:
    with pytest.raises(ValueError, match="block_size"):
        KvCacheConfig(block_size=3)
    with pytest.raises(TypeError):
        KvCacheConfig("positional") if False else KvCacheRetentionConfig()
    with pytest.raises(RuntimeError, match="Invalid priority"):
        KvCacheRetentionConfig([], 101)


def test_what_is_not_modelled_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="speculative_config"):
        build(speculative_config=object())
    with pytest.raises(NotImplementedError, match="n, best_of"):
        SamplingParams(n=2, temperature=1.0)


@pytest.mark.pins("needs_gpu_for_arguments")
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_arguments_cannot_be_constructed_without_a_gpu() -> None:
    with pytest.raises(RuntimeError, match="GPU"):
        TorchLlmArgs(model=SMALL)


@pytest.mark.pins("unknown_fields_refused")
def test_sampling_params_refuse_unknown_fields() -> None:
    with pytest.raises(TypeError, match="nonsense"):
        SamplingParams(nonsense=1)


def test_sampling_params_have_the_fields_of_the_table() -> None:
    fields = SamplingParams(**dict.fromkeys(("top_k", "stop")))
    assert fields.max_tokens == 32
    assert (fields.detokenize, fields.pad_id, fields.seed) == (True, None, None)
    assert tuple(SamplingParams.__dataclass_fields__) == facts.surface(stubs_path("SamplingParams")).names
    with pytest.raises(ValueError, match="top_p"):
        SamplingParams(top_p=1.5)


def stubs_path(name: str) -> str:
    return next(surface.path for surface in facts.SURFACES if surface.name == name)


@pytest.mark.pins("end_id_needed")
def test_without_a_tokenizer_end_id_is_needed(llm: LLM) -> None:
    with pytest.raises(ValueError, match="end_id"):
        submit(llm, end_id=None)


@pytest.mark.pins("strings_ignored")
def test_stop_strings_are_not_tokenised_once_end_id_is_set(llm: LLM) -> None:
    with pytest.raises(RuntimeError, match="stop_token_ids"):
        submit(llm, stop=["x"])


def test_with_a_tokenizer_text_goes_in_and_comes_out() -> None:
    with build(skip_tokenizer_init=False) as llm:
        output = llm.generate("1+1", SamplingParams(max_tokens=5, end_id=END))
        assert output.prompt_token_ids
        assert output.outputs[0].text == llm.tokenizer.decode(output.outputs[0].token_ids)


def test_an_llm_cannot_be_pickled(llm: LLM) -> None:
    with pytest.raises(TypeError):
        pickle.dumps(llm)


def test_generate_async_has_the_signature_of_the_table() -> None:
    names = tuple(inspect.signature(LLM.generate_async).parameters)
    assert names == ("self", *facts.surface("tensorrt_llm.LLM.generate_async").names)
    assert "trace_headers" not in names


@pytest.mark.pins("prompt_limit")
def test_a_prompt_longer_than_max_num_tokens_is_refused() -> None:
    with build(max_num_tokens=BLOCK, max_batch_size=2) as llm, pytest.raises(ValueError, match="max_num_tokens"):
        submit(llm, [1] * (BLOCK + 1))


@pytest.mark.pins("chunks_processed")
def test_a_long_prompt_is_prefilled_in_chunks_with_a_call_after_each(reference: Any, salt: str) -> None:
    prompt = [i % 200 for i in range(5 * BLOCK + 3)]
    settings = {"max_num_tokens": 2 * BLOCK + 7, "max_batch_size": 2, "enable_chunked_prefill": True}
    with build(**settings) as llm:
        output = finish(llm, prompt, salt, logits_processor=Record(salt), max_tokens=2).outputs[0]
        assert output.token_ids == reference(prompt, 2)
        assert [call[4] for call in CALLS[salt]] == [[prompt]] * 3 + [[prompt + output.token_ids[:1]]]
        assert llm.get_stats()[0]["iterations"] == [(1, 32), (1, 32), (1, 19), (1, 1)]


@pytest.mark.pins("vocabulary_checked")
@pytest.mark.parametrize("token", [-1, VOCABULARY])
def test_ids_outside_the_vocabulary_are_refused(llm: LLM, token: int) -> None:
    with pytest.raises(RequestError, match="Token ID out of range"):
        finish(llm, [1, token])


def test_max_seq_len_ends_a_response(salt: str) -> None:
    with build(max_seq_len=20) as llm:
        output = finish(llm, list(range(17)), max_tokens=50).outputs[0]
        assert (len(output.token_ids), output.finish_reason) == (3, "length")
        with pytest.raises(RequestError, match="no room"):
            finish(llm, list(range(20)))


@pytest.mark.pins("batched")
def test_ready_requests_share_a_forward_pass(llm: LLM, reference: Any, salt: str) -> None:
    gate = submit(llm, salt=salt, logits_processor=Gate(salt), max_tokens=3)
    others = [submit(llm, [i], next(tags), max_tokens=4) for i in range(5)]
    GATES[salt].release(100)
    assert gate.result(timeout=30).finished
    for i, other in enumerate(others):
        assert other.result(timeout=30).outputs[0].token_ids == reference([i], 4)
    assert max(rows for rows, _ in llm.get_stats()[0]["iterations"][-9:]) == 6


@pytest.mark.pins("model_registered", "additional_outputs")
def test_a_registered_class_replaces_the_stock_class(reference: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_utils, "MODEL_CLASS_MAPPING", dict(modeling_utils.MODEL_CLASS_MAPPING))
    calls = []

    @modeling_utils.register_auto_model("Qwen3ForCausalLM")
    class Routed(Qwen3ForCausalLM):
        def forward(
            self, attn_metadata: Any, input_ids: Any = None, position_ids: Any = None, **kwargs: Any
        ) -> dict[str, torch.Tensor]:
            hidden = self.model(attn_metadata=attn_metadata, input_ids=input_ids, position_ids=position_ids, **kwargs)
            rows = hidden[attn_metadata.seq_lens_cuda.cumsum(0).long() - 1]
            calls.append((tuple(input_ids.shape), tuple(position_ids.shape), attn_metadata.num_contexts))
            logits = self.lm_head(rows).float()
            logits[:, STOP] = torch.where(rows[:, 0] > 1e9, 1e9, logits[:, STOP])
            return {"logits": logits, "score": rows.mean(-1)}

    with build() as llm:
        result = finish(llm, max_tokens=3, additional_model_outputs=["score"]).outputs[0]
        assert result.token_ids == reference(PROMPT, 3)
        assert result.additional_generation_outputs["score"].shape == (3,)
        assert calls == [((5,), (1, 5), 1), ((1,), (1, 1), 0), ((1,), (1, 1), 0)]
        with pytest.raises(RequestError, match="no 'other'"):
            finish(llm, additional_model_outputs=["other"])


def test_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    for name in ("model.safetensors", "generation_config.json"):
        (tmp_path / name).symlink_to(SMALL / name)
    (tmp_path / "config.json").write_text((SMALL / "config.json").read_text().replace("Qwen3ForCausalLM", "NoSuch"))
    with pytest.raises(ValueError, match="NoSuch"):
        LLM(model=tmp_path, skip_tokenizer_init=True)


def test_a_class_with_parameters_beyond_the_checkpoint_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_utils, "MODEL_CLASS_MAPPING", dict(modeling_utils.MODEL_CLASS_MAPPING))

    @modeling_utils.register_auto_model("Qwen3ForCausalLM")
    class Routed(Qwen3ForCausalLM):
        def __init__(self, model_config: Any) -> None:
            super().__init__(model_config)
            self.router = torch.nn.Linear(2, 2)

    with pytest.raises(KeyError, match="router"):
        build()


def test_logits_equal_the_torch_engine_to_the_bit(salt: str) -> None:
    cache = TorchKvCacheConfig(tokens_per_block=BLOCK, max_tokens=1024)
    engine = TorchEngine.from_folder(SMALL, TorchEngineConfig(kv_cache_config=cache, device="cpu"))
    handle = engine.open(kv_tokens=100)
    history: list[int] = []
    with build() as llm:
        for new in (PROMPT, [9, 8, 7], [1], list(range(30)), [2], [3, 4]):
            history += new
            want = engine.step([EngineRow(handle, new)]).logits[0]
            output = finish(llm, history, salt, return_generation_logits=True, max_tokens=1)
            assert output.cached_tokens == len(history) - len(new)
            assert torch.equal(output.outputs[0].generation_logits[0], want)
