"""Files of trained routers: refusal of hostile and damaged ones, our format, the converter, lazy imports."""

import json
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.support.commands import run
from tests.unit.citer_layout import vector_state as citer_state
from tests.unit.r2r_layout import BOLD, checkpoint, random_state, vector_state
from tokenrouter.errors import ConfigError, InvalidRequest
from tokenrouter.policies.base import PolicyContext
from tokenrouter.policies.checkpoints import RouterFile, citer, collm, load_router, r2r, resolve, save_router
from tokenrouter.policies.checkpoints.unpickle import load_plain
from tools.convert_router import main


class Hostile:
    """Writes a file when it is unpickled."""

    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return open, (str(self.target), "w")


@pytest.mark.parametrize("where", ["state_dict", "init_args", "top"])
@pytest.mark.parametrize("legacy", [False, True])
def test_hostile_pickle_is_refused_and_not_executed(tmp_path, where, legacy):
    content = checkpoint(vector_state())
    target = tmp_path / "executed"
    if where == "top":
        content["extra"] = Hostile(target)
    else:
        content[where] = {**content[where], "extra": Hostile(target)}
    torch.save(content, tmp_path / "r.pt", _use_new_zipfile_serialization=not legacy)
    with pytest.raises(ConfigError, match=r"r\.pt is refused: it asks for .*open.* nothing in it was executed"):
        r2r.load_r2r(tmp_path / "r.pt")
    assert not target.exists()


@pytest.mark.parametrize("reader", [r2r.load_r2r, citer.load_citer, collm.load_deferral])
def test_every_reader_refuses_a_bare_hostile_pickle(tmp_path, reader):
    target = tmp_path / "executed"
    (tmp_path / "r.pth").write_bytes(pickle.dumps(Hostile(target)))
    with pytest.raises(ConfigError):
        reader(tmp_path / "r.pth")
    assert not target.exists()


def test_objects_of_this_package_and_functions_are_refused_too(tmp_path):
    for value in (RouterFile("r2r", {}), os.path.join, np.zeros(2)):
        torch.save({"state_dict": value}, tmp_path / "r.pt")
        with pytest.raises(ConfigError, match="is refused"):
            load_plain(tmp_path / "r.pt")


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "int64", "int32", "bool", ">f8"])
def test_numpy_numbers_become_python_numbers(tmp_path, dtype):
    value = np.array([1.0]).astype(dtype)[0]
    torch.save({"value": value, "dtype": torch.bfloat16, "plain": [1, "x", None, (2.5,)]}, tmp_path / "r.pt")
    content = load_plain(tmp_path / "r.pt")
    assert content["value"] == value.item()
    assert type(content["value"]) is type(value.item())
    assert content["dtype"] is torch.bfloat16
    assert content["plain"] == [1, "x", None, (2.5,)]


def test_numpy_objects_are_refused(tmp_path):
    torch.save({"value": np.array([None], dtype=object)}, tmp_path / "r.pt")
    with pytest.raises(ConfigError, match="is refused"):
        load_plain(tmp_path / "r.pt")


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"PK\x03\x04 broken zip"])
@pytest.mark.parametrize("name", ["r.pt", "r.safetensors"])
@pytest.mark.parametrize("reader", [r2r.load_r2r, citer.load_citer, collm.load_deferral])
def test_damaged_files_are_refused(tmp_path, content, name, reader):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=name):
        reader(tmp_path / name)


def test_truncated_checkpoint_is_refused(tmp_path):
    torch.save(checkpoint(vector_state()), tmp_path / "r.pt")
    data = (tmp_path / "r.pt").read_bytes()
    (tmp_path / "r.pt").write_bytes(data[: len(data) // 2])
    with pytest.raises(ConfigError, match="cannot be read"):
        r2r.load_r2r(tmp_path / "r.pt")


@pytest.mark.parametrize("name", sorted(set(vector_state()) - {"token_embeddings.weight"}))
def test_missing_tensor_of_r2r_is_named(name):
    state = vector_state()
    del state[name]
    with pytest.raises(ConfigError) as refusal:
        r2r.build(RouterFile("r2r", state, source="x.pt", args={"model_type": BOLD}))
    named = name
    if name.endswith("layer_norm.weight"):
        # Without it the block is not seen, so its other tensors are left over, or the sizes do not fit.
        named = "backbone."
    assert "x.pt" in str(refusal.value)
    assert named in str(refusal.value)


@pytest.mark.parametrize(
    "name", sorted(set(vector_state()) - {"combined_projection.weight", "logits_projection.weight"})
)
def test_misshapen_tensor_of_r2r_is_named_with_both_shapes(name):
    state = vector_state()
    state[name] = torch.zeros(*state[name].shape, 2)
    with pytest.raises(ConfigError, match=r"x\.pt: tensor '.*' has shape \[.*, 2\].*expected floats of shape \["):
        r2r.build(RouterFile("r2r", state, source="x.pt", args={"model_type": BOLD}))


def test_widths_that_do_not_fit_together_are_explained():
    state = vector_state()
    state["combined_projection.weight"] = torch.zeros(2, 9)
    args = {"model_type": BOLD}
    with pytest.raises(ConfigError, match=r"takes 9 inputs, which does not fit hidden \+ token \+ logits .* width 2"):
        r2r.build(RouterFile("r2r", state, args=args))
    with pytest.raises(ConfigError, match="unexpected tensors extra"):
        r2r.build(RouterFile("r2r", vector_state() | {"extra": torch.zeros(1)}, args=args))
    integers = vector_state() | {"backbone.output_layer.1.bias": torch.zeros(1, dtype=torch.int64)}
    with pytest.raises(ConfigError, match=r"output_layer\.1\.bias' has shape \[1\] and type torch\.int64"):
        r2r.build(RouterFile("r2r", integers, args=args))


@pytest.mark.parametrize("model_type", ["Unknown", None])
def test_unknown_classes_are_refused(tmp_path, model_type):
    torch.save(checkpoint(vector_state(), model_type), tmp_path / "r.pt")
    with pytest.raises(
        ConfigError, match=rf"r\.pt.*model_type '{model_type}' is no class of R2R; known: HiddenStatesTokenLMHeadLogits"
    ):
        r2r.load_r2r(tmp_path / "r.pt")


def windowed(columns=6, *, name="Logits", norm=None, **init_args):
    """A file of a class of several positions, whose projection takes so many inputs."""
    state = random_state("HiddenStatesClassifier", hidden=columns)
    if name == "Logits":
        for part in ("weight", "bias"):
            state[f"logits_projection.{part}"] = state.pop(f"hidden_states_projection.{part}")
    if norm is not None:
        state |= {"layer_norm.weight": torch.ones(norm), "layer_norm.bias": torch.zeros(norm)}
        init_args["normalize_input"] = True
    return checkpoint(state, f"Multi{name}Classifier", **init_args)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (windowed(7), r"r\.pt.*logits_projection\.weight takes 7 inputs.*neural_window_size 3; state the number"),
        (windowed(neural_window_size=4), r"takes 6 inputs, which is no multiple of init_args\.neural_window_size 4"),
        (windowed(neural_window_size=0), "init_args.neural_window_size is 0; it is how many positions"),
        (windowed(neural_window_size="3"), "init_args.neural_window_size is '3'"),
        (windowed(name="HiddenStates", norm=6), r"'layer_norm\.weight' has shape \[6\].*\[2\] \(hidden size of one"),
        (
            checkpoint(random_state("LogitsClassifier"), "MultiClassLogitsClassifier"),
            r"output_layer\.1\.weight has 1 rows; expected 3: one for p\(divergent\), or three for match, neutral",
        ),
        (
            checkpoint(random_state("LogitsClassifier", outputs=2), "LogitsClassifier"),
            r"has 2 rows; expected 1 or 3",
        ),
    ],
)
def test_what_a_class_cannot_be_is_told_with_the_field(tmp_path, content, text):
    torch.save(content, tmp_path / "r.pt")
    with pytest.raises(ConfigError, match=text) as caught:
        r2r.load_r2r(tmp_path / "r.pt")
    assert "\n" not in str(caught.value)


def test_how_many_positions_a_network_sees_survives_conversion(tmp_path):
    torch.save(windowed(neural_window_size=2), tmp_path / "r.pt")
    save_router(r2r.read_official(tmp_path / "r.pt"), tmp_path / "r.safetensors")
    for name in ("r.pt", "r.safetensors"):
        network = r2r.load_r2r(tmp_path / name)
        assert (network.window, dict(network.sizes)) == (2, {"logits": 3})


def test_hidden_size_comes_from_shapes_not_from_init_args(tmp_path):
    content = checkpoint(vector_state())
    assert content["init_args"]["hidden_states_size"] == 2048
    torch.save(content, tmp_path / "r.pt")
    assert dict(r2r.load_r2r(tmp_path / "r.pt").sizes) == {"hidden": 2, "logits": 3, "token": 2}


def test_half_precision_weights_are_used_as_float32(tmp_path):
    state = {name: tensor.to(torch.bfloat16) for name, tensor in vector_state().items()}
    torch.save(checkpoint(state), tmp_path / "r.pt")
    assert r2r.load_r2r(tmp_path / "r.pt").backbone.output[0].dtype == torch.float32


# --- our format -----------------------------------------------------------------------------------------------------


def test_our_format_round_trip(tmp_path):
    router = RouterFile("r2r", vector_state(), threshold=0.1, models=("a", "b"), args={"model_type": BOLD, "n": 1})
    save_router(router, tmp_path / "r.safetensors")
    back = load_router(tmp_path / "r.safetensors", "r2r")
    assert (back.kind, back.threshold, back.models, back.args) == (router.kind, 0.1, router.models, router.args)
    assert back.tensors.keys() == router.tensors.keys()
    assert all(torch.equal(back.tensors[name], router.tensors[name]) for name in router.tensors)
    assert [path.name for path in tmp_path.iterdir()] == ["r.safetensors"]
    assert load_router(tmp_path / "r.safetensors", "r2r", framework="np").tensors["logits_projection.bias"].shape == (
        2,
    )


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"format": "else"}, "no router; convert it"),
        ({"version": "2"}, "format version 2; this release reads 1"),
        ({"kind": "citer"}, "of kind 'citer', not 'r2r'"),
        ({"threshold": "much"}, "damaged metadata"),
        ({"models": "{"}, "damaged metadata"),
        ({"args": "[]"}, "damaged metadata"),
    ],
)
def test_other_safetensors_files_are_refused(tmp_path, change, text):
    metadata = {"format": "tokenrouter-router", "version": "1", "kind": "r2r", **change}
    save_file({"x": torch.zeros(1)}, tmp_path / "r.safetensors", metadata)
    with pytest.raises(ConfigError, match=text):
        load_router(tmp_path / "r.safetensors", "r2r")


def test_paths_do_not_lead_out_of_the_deployment(tmp_path):
    inside = tmp_path / "repository"
    inside.mkdir()
    (inside / "r.pt").touch()
    (tmp_path / "secret.pt").touch()
    context = PolicyContext(("small", "large"), str(inside))
    assert resolve(context, "r.pt") == inside / "r.pt"
    assert resolve(context, str(inside / "r.pt")) == inside / "r.pt"
    for path in ("../secret.pt", str(tmp_path / "secret.pt"), "x/../../secret.pt"):
        with pytest.raises(InvalidRequest, match="lies outside"):
            resolve(context, path)
    (inside / "link.pt").symlink_to(tmp_path / "secret.pt")
    assert resolve(context, "link.pt") == inside / "link.pt"
    with pytest.raises(ConfigError, match="does not exist"):
        resolve(context, "none.pt")
    assert resolve(PolicyContext(("small", "large")), str(tmp_path / "secret.pt")).exists()


# --- Co-LLM folders -------------------------------------------------------------------------------------------------


def model_folder(folder, *, name="lm_head.weight", rows=6, defer=5, binary=False, where="tokenizer.json"):
    folder.mkdir()
    matrix = torch.arange(rows * 3, dtype=torch.float32).reshape(rows, 3)
    if binary:
        torch.save({name: matrix, "other": torch.zeros(1)}, folder / "pytorch_model.bin")
    else:
        save_file({"other": torch.zeros(1)}, folder / "model-00001-of-00002.safetensors")
        save_file({name: matrix.to(torch.bfloat16)}, folder / "model-00002-of-00002.safetensors")
    tokens = (
        {"added_tokens": [{"id": defer, "content": "<|defer|>"}]} if where == "tokenizer.json" else {"<|defer|>": defer}
    )
    (folder / where).write_text(json.dumps(tokens))
    return folder


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("name", ["lm_head.weight", "model.embed_tokens.weight"])
def test_deferral_row_of_a_folder_is_the_last_vocabulary_row(tmp_path, name, binary):
    row = collm.load_deferral(model_folder(tmp_path / "small", name=name, binary=binary))
    assert row.weight.tolist() == [15.0, 16.0, 17.0]
    assert row.weight.dtype == torch.float32


@pytest.mark.parametrize("where", ["tokenizer.json", "added_tokens.json"])
def test_padded_vocabulary_is_noticed(tmp_path, where):
    folder = model_folder(tmp_path / "small", rows=8, where=where)
    with pytest.raises(ConfigError, match=r"id 5, but the last of the 8 rows of lm_head\.weight is 7"):
        collm.load_deferral(folder)


def test_folder_without_head_and_file_without_vector_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"has neither lm_head\.weight nor model\.embed_tokens\.weight"):
        collm.load_deferral(model_folder(tmp_path / "small", name="else.weight"))
    torch.save(torch.zeros(2, 3), tmp_path / "g.bin")
    with pytest.raises(ConfigError, match=r"'deferral\.weight' has shape \[2, 3\].*expected floats of shape \[\*\]"):
        collm.load_deferral(tmp_path / "g.bin")
    torch.save({"g": torch.zeros(3)}, tmp_path / "g.bin")
    with pytest.raises(ConfigError, match="no deferral row"):
        collm.load_deferral(tmp_path / "g.bin")


# --- converter ------------------------------------------------------------------------------------------------------


def convert(*arguments):
    return run(main, *arguments)


@pytest.mark.parametrize("drop", [False, True])
def test_converted_r2r_decides_alike(tmp_path, drop):
    torch.save(checkpoint(vector_state(), keep_embedding=True), tmp_path / "r_all.pt")
    out = tmp_path / "r.safetensors"
    result = convert(
        tmp_path / "r_all.pt",
        "--from",
        "r2r",
        "--output",
        out,
        "--models",
        "a, b",
        *(["--drop-embedding"] if drop else []),
    )
    assert result.exit_code == 0, result.output
    network = r2r.load_r2r(out)
    assert (network.embedding is None) == drop
    assert network.threshold == 0.21
    assert "trained for a + b" in network.origin
    features = {
        "hidden": torch.tensor([[0.3, -1.2], [1.0, 0.5]]),
        "token": vector_state()["token_embeddings.weight"][[2, 0]],
        "logits": torch.tensor([[3.0, 2, 1], [4, 0.5, 0]]),
    }
    assert network.probability(features).tolist() == pytest.approx([0.226466, 0.203184], abs=1e-6)


def test_converted_citer_and_collm_decide_alike(tmp_path):
    torch.save(citer_state(), tmp_path / "c.pth")
    out = tmp_path / "c.safetensors"
    assert convert(tmp_path / "c.pth", "--from", "citer", "--output", out, "--threshold", "0.98").exit_code == 0
    network = citer.load_citer(out)
    assert network.threshold == 0.98
    assert network.score(torch.tensor([[1.0, 2.0]])).tolist() == pytest.approx([0.985936], abs=1e-6)
    folder = model_folder(tmp_path / "small")
    assert convert(folder, "--from", "collm", "--output", tmp_path / "g.safetensors").exit_code == 0
    assert collm.load_deferral(tmp_path / "g.safetensors").weight.tolist() == [15.0, 16.0, 17.0]


def test_converter_refuses_what_is_no_checkpoint_and_writes_nothing(tmp_path):
    torch.save({"state_dict": {"x": torch.zeros(1)}, "model_type": BOLD}, tmp_path / "r.pt")
    out = tmp_path / "r.safetensors"
    result = convert(tmp_path / "r.pt", "--from", "r2r", "--output", out)
    assert result.exit_code == 2
    assert "is missing" in result.stderr
    assert not out.exists()
    assert convert(tmp_path / "r.pt", "--from", "r2r", "--output", tmp_path / "r.pt").exit_code == 2


def test_policies_are_imported_and_built_without_torch():
    """The orchestrator's process has no use for it; only `bert` loads it."""
    code = """
import sys
from tokenrouter.policies import BUILTIN, load_policy, policy_class
from tokenrouter.policies.base import EntryRequest, PolicyContext
from tokenrouter.messages import PolicySpec
for name in BUILTIN:
    policy_class(name)
context = PolicyContext(("small", "large"))
for name, params in {
    "r2r": '{"checkpoint": "x"}', "citer": '{"checkpoint": "x"}', "collm": "{}", "me": "{}", "glimprouter": "{}",
    "query_level": "{}", "random": "{}", "rstitch": "{}",
}.items():
    load_policy(PolicySpec(name, params), context).prepare("")
    load_policy(PolicySpec(name, params), context).entry(EntryRequest("", [1], 0))
sys.exit("torch" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
