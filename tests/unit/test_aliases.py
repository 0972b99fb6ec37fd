"""Other models under which the entry model is called: what the builder writes for them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from tests.support.repositories import emulated_spec, write_emulated
from tokenrouter.assembly import build_subserver
from tokenrouter.errors import ConfigError
from tokenrouter.messages import Hello, PolicySpec
from tokenrouter.protocol_version import PROTOCOL_VERSION
from tokenrouter.repository import Repository
from tokenrouter.triton.tensors import (
    ENTRY_INPUTS,
    ENTRY_OUTPUTS,
    POSTPROCESSING_INPUTS,
    POSTPROCESSING_OUTPUTS,
    PREPROCESSING_INPUTS,
    PREPROCESSING_OUTPUTS,
)
from tools.build_repository.aliases import SHAPE_NAMES, SHAPES
from tools.build_repository.build import BUILT, built_deployment, repository_files
from tools.build_repository.spec import AliasSpec


def built(folder: Path, **entry: Any) -> Repository:
    return Repository(write_emulated(folder, emulated_spec(entry=entry)))


def declared(config: Any, of: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {tensor["name"]: (tensor["data_type"], tuple(map(int, tensor["dims"]))) for tensor in config[of]}


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_maps_every_tensor_onto_one_of_the_entry_model(tmp_path: Path, name: str) -> None:
    shape = SHAPES[name]
    config = built(tmp_path, aliases={"other": {"shape": name}}).config("other")
    (step,) = config["ensemble_scheduling"]["step"]
    assert step["model_name"] == "tokenrouter"
    assert {own: target for target, own in step["input_map"].items()} == shape.inputs
    assert {own: target for target, own in step["output_map"].items()} == shape.outputs
    kinds = {own: ENTRY_INPUTS[target] for own, target in shape.inputs.items()}
    assert declared(config, "input") == {own: (f"TYPE_{kind.type}", kind.dims) for own, kind in kinds.items()}
    outputs = {own: ENTRY_OUTPUTS[target] for own, target in shape.outputs.items()}
    assert declared(config, "output") == {own: (f"TYPE_{kind}", dims) for own, (kind, dims) in outputs.items()}
    assert int(config.get("max_batch_size", 0)) == (8 if shape.batched else 0)
    assert config["model_transaction_policy"] == {"decoupled": True}


def test_who_asks_for_nothing_gets_nvidias_names(tmp_path: Path) -> None:
    repository = built(tmp_path)
    assert repository.names() == ["ensemble", "large", "small", "tensorrt_llm_bls", "tokenrouter"]
    assert repository.entry().name == "tokenrouter"


def test_a_model_without_streams_stands_beside_the_entry_model(tmp_path: Path) -> None:
    aliases = {"ensemble": {"decoupled": False}, "tensorrt_llm_bls": {}}
    repository = built(tmp_path, unary="once", aliases=aliases, max_inflight=3, defaults={"max_tokens": 9})
    assert not repository.config("once").get("model_transaction_policy", {}).get("decoupled")
    steps = {name: repository.config(name)["ensemble_scheduling"]["step"][0]["model_name"] for name in aliases}
    assert steps == {"ensemble": "once", "tensorrt_llm_bls": "tokenrouter"}
    # It is an entry model for Triton, and none of those between which a tool would have to choose.
    assert repository.entry().name == "tokenrouter"
    once = repository.entry("once")
    assert (once.max_inflight, once.defaults.max_tokens) == (3, 9)
    assert [entry.name for entry in repository.entries_to("small")] == ["tokenrouter"]
    # Each counts what it reserves by itself, so each has blocks of its own.
    assert repository.model("small").unary_kv_share == 0.25
    subserver = build_subserver(repository.model("small"), repository)
    for peer, (share, part) in enumerate({"unary": 0.25, "direct": 0.25, "routed": 0.5}.items()):
        hello = Hello(PROTOCOL_VERSION, share, share, ("small", "large"), PolicySpec("single"))
        subserver.handle(peer, hello, now_ns=0)
        info = subserver.outbox.pop()[1]
        assert info.kv_blocks == int(subserver.engine.info.kv_blocks * part)


def test_models_of_text_alone(tmp_path: Path) -> None:
    shapes = {name: {"shape": name} for name in ("preprocessing", "postprocessing")}
    repository = built(tmp_path, aliases=shapes)
    tables = {
        "preprocessing": (PREPROCESSING_INPUTS, PREPROCESSING_OUTPUTS),
        "postprocessing": (POSTPROCESSING_INPUTS, POSTPROCESSING_OUTPUTS),
    }
    for name, (inputs, outputs) in tables.items():
        config = repository.config(name)
        assert declared(config, "input") == {name: (f"TYPE_{kind.type}", kind.dims) for name, kind in inputs.items()}
        assert declared(config, "output") == {name: (f"TYPE_{kind}", dims) for name, (kind, dims) in outputs.items()}
        assert repository.entry(name).models == ("small", "large")


def test_the_built_repository_says_what_it_offers(tmp_path: Path) -> None:
    aliases = {"chat": {"shape": "llmapi"}}
    root = built(tmp_path, aliases=aliases).root
    assert built_deployment(root).entry.aliases == {"chat": AliasSpec("llmapi")}
    assert "aliases:\n    chat:\n      shape: llmapi\n      decoupled: true\n" in (root / BUILT).read_text()


@pytest.mark.parametrize("shape", SHAPES)
def test_without_a_unary_model_no_alias_can_be_one(shape: str) -> None:
    spec = emulated_spec(entry={"aliases": {"other": {"shape": shape, "decoupled": False}}})
    with pytest.raises(ConfigError, match=r"entry\.aliases\.other\.decoupled is false, for which entry\.unary has"):
        repository_files(spec)


@pytest.mark.parametrize(
    "entry",
    [{"unary": "small"}, {"unary": "ensemble"}, {"unary": "tokenrouter"}, {"aliases": {"large": {}}}],
    ids=str,
)
def test_two_models_of_one_name_are_refused(entry: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="names must differ"):
        repository_files(emulated_spec(entry=entry))


def test_an_unknown_shape_is_refused_with_all_that_there_are() -> None:
    with pytest.raises(msgspec.ValidationError, match=f"shape is 'bls'; known: {', '.join(SHAPE_NAMES)}"):
        emulated_spec(entry={"aliases": {"other": {"shape": "bls"}}})


def test_the_page_on_clients_knows_every_shape_and_its_examples_can_be_built() -> None:
    page = (Path(__file__).parents[2] / "docs" / "clients.md").read_text("utf-8")
    table = page.partition("| shape | tensors |")[2].partition("\n\n")[0]
    cells = [row.split("|")[1] for row in table.splitlines()[2:]]
    assert sorted(name.strip(" `") for cell in cells for name in cell.split(",")) == sorted(SHAPE_NAMES)
    examples = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    assert len(examples) == 2
    for example in examples:
        entry = {**yaml.safe_load(example)["entry"], "policy": "scripted", "policy_params": {"writers": ["small"]}}
        assert "tokenrouter_unary/config.pbtxt" in repository_files(emulated_spec(entry=entry))
