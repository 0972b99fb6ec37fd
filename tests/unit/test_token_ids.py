"""What of the TensorRT-LLM adapter needs no library."""

from __future__ import annotations

import copy
import pickle

from tokenrouter.engines.tensorrt_llm.token_ids import TokenIds


def test_a_prompt_is_cheap_to_copy() -> None:
    ids = TokenIds([5, 6, 7])
    assert isinstance(ids, list)
    sent = pickle.loads(pickle.dumps(ids))
    assert (type(sent), type(copy.deepcopy(sent)), copy.deepcopy(sent)) == (TokenIds, list, [5, 6, 7])
