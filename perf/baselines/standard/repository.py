"""The model repository of the baseline, made from TokenRouter's own: the same LLMs, each as a server of its own."""

from __future__ import annotations

import shutil
from pathlib import Path

from perf.baselines.standard.wire import CALL, IDS, REPLY
from tokenrouter.repository import Repository

# Ragged: calls of different length may share a batch on their way to the model.
_CONFIG = """\
backend: "python"
max_batch_size: 64
model_transaction_policy {{ decoupled: true }}
input [
  {{ name: "{ids}", data_type: TYPE_INT32, dims: [ -1 ], allow_ragged_batch: true }},
  {{ name: "{call}", data_type: TYPE_UINT8, dims: [ -1 ], allow_ragged_batch: true }}
]
output [ {{ name: "{reply}", data_type: TYPE_UINT8, dims: [ -1 ] }} ]
instance_group [ {{ count: 1, kind: KIND_CPU }} ]
dynamic_batching {{ }}
parameters {{ key: "deployment", value: {{ string_value: "{deployment}" }} }}
parameters {{ key: "entry", value: {{ string_value: "{entry}" }} }}
parameters {{ key: "delay_ms", value: {{ string_value: "{delay_ms}" }} }}
"""


def write_standard_repository(folder: Path, deployment: Path, *, entry: str, delay_ms: float) -> tuple[str, ...]:
    """Writes one model of the Python backend per LLM. Returns their names, small first.

    Args:
        folder: where to.
        deployment: model repository of TokenRouter; checkpoints, engine options and routers are read from there.
        entry: its entry model.
        delay_ms: how long a step that could start waits for further calls; 0 starts it at once.

    Raises:
        ConfigError: the deployment's configuration is wrong.
    """
    deployment = deployment.resolve()
    models = Repository(deployment).entry(entry).models
    for name in models:
        version = folder / name / "1"
        version.mkdir(parents=True)
        shutil.copyfile(Path(__file__).with_name("model.py"), version / "model.py")
        config = _CONFIG.format(ids=IDS, call=CALL, reply=REPLY, deployment=deployment, entry=entry, delay_ms=delay_ms)
        (folder / name / "config.pbtxt").write_text(config)
    return models
