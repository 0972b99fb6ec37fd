"""`tools.evaluate` gets the same answers from a server as from the offline engine."""

from __future__ import annotations

import pytest

from tokenrouter.offline import TokenRouter
from tools.demo_models.task import Problem
from tools.evaluate import Setting, offline_generator, server_generator
from tools.tritonserver.server import TritonServer

pytestmark = pytest.mark.integration

PROBLEMS = [Problem(f"Question {number}", "1") for number in range(12)]
SETTINGS = [Setting("random", "random", {"p": 0.4}), Setting("large only", "single", {"model": "large"})]


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.label)
def test_answers_of_a_server_are_those_of_the_offline_engine(
    shared: TritonServer, offline: TokenRouter, setting: Setting
) -> None:
    done: list[int] = []
    served = server_generator(shared.grpc_url, "tokenrouter", 24, 4)(PROBLEMS, setting, done.append)
    here = offline_generator(offline, 24)(PROBLEMS, setting, lambda count: None)
    assert [(answer.text, answer.tokens, answer.handoffs) for answer in served] == [
        (answer.text, answer.tokens, answer.handoffs) for answer in here
    ]
    assert all(0 < answer.seconds < 30 for answer in served)
    assert done[-1] == len(PROBLEMS)
