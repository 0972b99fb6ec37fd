from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.torch_models import CONTEXT, KINDS, VOCAB, extend, load, save_kind
from tokenrouter.engines.base import Engine
from tokenrouter.engines.torch.config import KvCacheConfig, TorchEngineConfig
from tokenrouter.engines.torch.engine import TorchEngine
from tokenrouter.errors import ConfigError

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_kind(tmp_path_factory.mktemp(request.param), request.param)


def test_info_and_protocol(folder: Path) -> None:
    engine: Engine = load(folder, block_tokens=16, max_tokens=1000, max_seq_len=100, max_batch_size=3)
    info = engine.info
    assert (info.name, info.vocab_size, info.hidden_size, info.emulated) == ("torch", VOCAB, 48, False)
    assert (info.max_context, info.block_tokens, info.kv_blocks) == (100, 16, 62)
    assert (info.max_batch, info.max_num_tokens) == (3, 2048)


def test_defaults_hold_a_full_batch_at_full_length(folder: Path) -> None:
    engine = TorchEngine.from_folder(folder, TorchEngineConfig(device="cpu", threads=1))
    assert engine.info.max_context == CONTEXT
    assert engine.info.kv_blocks * engine.info.block_tokens == engine.info.max_batch * CONTEXT
    handles = [engine.open(kv_tokens=CONTEXT, prompt_tokens=1) for _ in range(engine.info.max_batch)]
    assert engine.blocks_leased == engine.info.kv_blocks
    assert len(handles) == engine.info.max_batch


def test_loading_sets_the_threads_of_the_process(folder: Path) -> None:
    load(folder, threads=2)
    assert torch.get_num_threads() == 2
    load(folder, threads=1)
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize(("parameters", "threads"), [(10**9, 1), (100, 3)])
def test_a_small_model_gets_one_thread_and_a_larger_one_every_core(
    folder: Path, monkeypatch: pytest.MonkeyPatch, parameters: int, threads: int
) -> None:
    monkeypatch.setattr("tokenrouter.engines.torch.engine.SINGLE_THREAD_PARAMETERS", parameters)
    monkeypatch.setattr("tokenrouter.engines.torch.engine.default_threads", lambda sharing: 3)
    load(folder, threads=None)
    assert torch.get_num_threads() == threads
    torch.set_num_threads(1)


def test_loading_touches_no_network(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    load(folder)


def test_bfloat16_is_served(folder: Path) -> None:
    engine = load(folder, dtype="bfloat16")
    handle = engine.open(kv_tokens=20, prompt_tokens=5)
    assert extend(engine, handle, [1, 2, 3]).dtype == torch.float32


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"max_batch": 4}, "max_batch.*known fields.*max_batch_size"),
        ({"max_batch_size": 0}, "max_batch_size is 0"),
        ({"max_batch_size": "8"}, r"\$\.max_batch_size"),
        ({"threads": -1}, "threads is -1"),
        ({"dtype": "float64"}, r"\$\.dtype"),
        ({"max_batch_size": 8, "max_num_tokens": 4}, "set max_num_tokens to 8 or more"),
        ({"kv_cache_config": {"tokens_per_block": 0}}, "kv_cache_config.tokens_per_block is 0"),
        ({"kv_cache_config": {"max_tokens": 3}}, "kv_cache_config.max_tokens is 3"),
        ({"kv_cache_config": {"fraction": 0.5}}, "fraction"),
    ],
)
def test_bad_settings_name_the_field(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TorchEngineConfig.from_mapping(raw)


def test_good_settings_are_read() -> None:
    config = TorchEngineConfig.from_mapping({"max_batch_size": 4, "kv_cache_config": {"tokens_per_block": 32}})
    assert config == TorchEngineConfig(max_batch_size=4, kv_cache_config=KvCacheConfig(tokens_per_block=32))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "tpu9"}, "device is 'tpu9'"),
        ({"device": "cuda:99"}, "CUDA devices exist"),
        ({"device": "meta"}, "use cpu, cuda"),
        ({"max_seq_len": CONTEXT + 1}, f"max_seq_len is {CONTEXT + 1}, but the model takes at most {CONTEXT}"),
    ],
)
def test_settings_that_do_not_fit_are_refused(folder: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(folder, **settings)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        load(tmp_path / "missing")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"config\.json: model_type is None"):
        load(tmp_path)
