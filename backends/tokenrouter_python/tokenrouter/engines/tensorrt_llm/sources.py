"""Files of TensorRT-LLM from which `facts` and `behaviours` were read."""

from __future__ import annotations

LLM = "tensorrt_llm/llmapi/llm.py"
ARGS = "tensorrt_llm/llmapi/llm_args.py"
SAMPLING = "tensorrt_llm/sampling_params.py"
RESULT = "tensorrt_llm/executor/result.py"
PROXY = "tensorrt_llm/executor/proxy.py"
RETENTION = "cpp/tensorrt_llm/nanobind/executor/request.cpp"
MODELING = "tensorrt_llm/_torch/models/modeling_utils.py"
SPECULATIVE = "tensorrt_llm/_torch/models/modeling_speculative.py"
PYEXECUTOR = "tensorrt_llm/_torch/pyexecutor"
EXECUTOR = f"{PYEXECUTOR}/py_executor.py"
ENGINE = f"{PYEXECUTOR}/model_engine.py, _execute_logit_post_processors"
KV = "cpp/tensorrt_llm/batch_manager/kvCacheManager.cpp"
SCHEDULER = "cpp/tensorrt_llm/batch_manager/microBatchScheduler.cpp"
