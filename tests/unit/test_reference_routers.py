"""R2R's classes and strategies give the values of the authors' own code, in `reference_routers.json`.

`python -m perf.reference_routers --source R2R --vectors tests/unit/reference_routers.json` ran that code and wrote it.
"""

import json
from pathlib import Path

import pytest
import torch

from perf.reference_routers.formulas import signals, state, written
from perf.reference_routers.rows import decisions
from tests.unit.policy_harness import make

VECTORS = json.loads(Path(__file__).with_name("reference_routers.json").read_text())
SIZES = VECTORS["sizes"]
LOGITS, HIDDEN, TOKENS = signals(2, VECTORS["positions"], vocabulary=SIZES["vocabulary"], hidden=SIZES["hidden"])
TABLE = "token_embeddings.weight"


@pytest.fixture(autouse=True)
def one_thread():
    """Networks of a few units are faster without hand-overs between threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def policy(folder, vector, **params):
    """A policy on the file of a class, weights by formula, its embedding left out as in the authors' own files."""
    weights = state(vector["shapes"])
    content = {
        "model_type": vector["class"],
        "init_args": vector["init_args"],
        "common_args": {"threshold": 0.5, "input_type": []},
        "state_dict": {name: tensor for name, tensor in weights.items() if name != TABLE},
    }
    torch.save(content, folder / "router.pt")
    table = weights.get(TABLE, torch.zeros(SIZES["vocabulary"], SIZES["hidden"]))
    given = {"input_embedding": lambda model: table}
    return make("r2r", {"checkpoint": "router.pt", **params}, directory=folder, **given)


def name_of(vector):
    return " ".join([vector["class"], *vector["init_args"]])


@pytest.mark.parametrize("vector", VECTORS["classes"], ids=name_of)
def test_every_class_decides_by_the_authors_probabilities(tmp_path, vector):
    """Each p lies between two thresholds, one of which it reaches."""
    positions = VECTORS["rows"] + (SIZES["window"] - 1) * vector["class"].startswith(("MultiLogits", "MultiHidden"))
    given = [each[:1, :positions] for each in (LOGITS, HIDDEN, TOKENS)]
    # The sources' windows are full from the third position on; before, the large model writes.
    before = "L" * (positions - VECTORS["rows"])
    for i, p in enumerate(vector["p"]):
        reached = written(decisions(policy(tmp_path, vector, threshold=p - 1e-5), *given)[0])
        missed = written(decisions(policy(tmp_path, vector, threshold=p + 1e-5), *given)[0])
        assert reached.startswith(before)
        assert reached[len(before) + i] == "L"
        assert missed[len(before) + i] == "s"


def test_all_of_the_authors_classes_are_there():
    assert len({vector["class"] for vector in VECTORS["classes"]}) == 12


@pytest.mark.parametrize("vector", VECTORS["strategies"], ids=lambda vector: json.dumps(vector["params"]))
def test_every_strategy_decides_as_the_authors_do(tmp_path, vector):
    """Theirs ran alone; ours runs both requests in batches of changing composition."""
    if "class" in vector:
        (network,) = (each for each in VECTORS["classes"] if name_of(each) == vector["class"])
        instance = policy(tmp_path, network, **vector["params"])
    else:
        instance = make("r2r", vector["params"])
    for seed in range(3):
        found = decisions(instance, LOGITS, HIDDEN, TOKENS, seed=seed)
        assert list(map(written, found)) == vector["decisions"]
    assert set("".join(vector["decisions"])) == {"L", "s"}
