"""vLLM's own scheduler through the cases of :mod:`tests.scheduler_cases`, in the environment where vLLM is installed.

:mod:`tests.scheduler_bench` starts this file as a process, so that nothing of vLLM is needed here. One line in is one
pass through the cases, one line out its times. No model is loaded and none is needed: a folder with a ``config.json``
is all that vLLM's configuration reads.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from tests.scheduler_cases import (
    ANSWER_TOKEN,
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    VOCAB_SIZE,
    Samples,
    Setup,
    Step,
    cases,
    run_pass,
)

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": MAX_MODEL_LEN,
    "torch_dtype": "float32",
}


class OtherProcess:
    """That process, seen from here: each call is one pass."""

    def __init__(self, python: str, only: str) -> None:
        command = [python, "-m", "tests.scheduler_bench_vllm", only]
        root = Path(__file__).parents[1]
        self._process = subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __call__(self) -> dict[str, Samples]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"the process with vLLM ended with exit code {self._process.wait()}")
        return {name: Samples(*columns) for name, columns in json.loads(answer).items()}


class VllmSubject:
    def __init__(self, folder: str, setup: Setup) -> None:
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.request import Request, RequestStatus

        self.num_preemptions = 0
        self._scheduler: Any = make_scheduler(folder, setup)
        self._params = cache(lambda n: SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True))
        self._request, self._aborted = Request, RequestStatus.FINISHED_ABORTED
        hash_function = get_hash_fn_by_name("sha256")
        init_none_hash(hash_function)
        self._hasher = get_request_block_hasher(BLOCK_SIZE, hash_function)

    def add(self, request_id: int, prompt: list[int], max_tokens: int) -> None:
        params = self._params(max_tokens)
        self._scheduler.add_request(self._request(str(request_id), prompt, params, None, block_hasher=self._hasher))

    def step(self) -> Step:
        from vllm.v1.outputs import ModelRunnerOutput

        scheduler = self._scheduler
        began = time.thread_time()
        plan = scheduler.schedule()
        scheduled = time.thread_time()
        self.num_preemptions += len(plan.preempted_req_ids or ())
        ids = list(plan.num_scheduled_tokens)
        requests = [scheduler.requests[request_id] for request_id in ids]
        result = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: row for row, request_id in enumerate(ids)},
            sampled_token_ids=[[ANSWER_TOKEN] if r.num_computed_tokens >= r.num_tokens else [] for r in requests],
            prompt_logprobs_dict={},
            pooler_output=[],
        )
        executed = time.thread_time()
        scheduler.update_from_output(plan, result)
        seconds = scheduled - began + time.thread_time() - executed
        return Step(seconds, len(ids), plan.total_num_scheduled_tokens)

    def end(self, request_ids: Iterable[int]) -> None:
        self._scheduler.finish_requests([str(request_id) for request_id in request_ids], self._aborted)


def make_scheduler(folder: str, setup: Setup) -> Any:
    import torch
    from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    model = ModelConfig(model=folder, skip_tokenizer_init=True, dtype="float32")
    cache = CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True)
    scheduler = SchedulerConfig(
        max_num_seqs=setup.max_num_seqs,
        max_num_batched_tokens=setup.token_budget,
        max_model_len=MAX_MODEL_LEN,
        enable_chunked_prefill=True,
        is_encoder_decoder=False,
        async_scheduling=False,
    )
    config = VllmConfig(model_config=model, cache_config=cache, scheduler_config=scheduler)
    num_blocks = setup.num_blocks + 1  # it counts the null block
    config.cache_config.num_gpu_blocks = num_blocks
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=2, head_size=32, dtype=torch.float32)
    memory = KVCacheConfig(num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    return Scheduler(config, memory, StructuredOutputManager(config), block_size=BLOCK_SIZE, log_stats=False)


def main(only: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints is no answer
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(KeyboardInterrupt):
        Path(folder, "config.json").write_text(json.dumps(MODEL))
        chosen = [case for case in cases() if only in case.name]
        VllmSubject(folder, Setup(1, 16))  # imports, once: every case runs in a process forked from this one
        for _ in sys.stdin:
            results = run_pass(lambda setup: VllmSubject(folder, setup), chosen)
            answers.write(json.dumps({name: (s.seconds, s.counts) for name, s in results.items()}) + "\n")
            answers.flush()


if __name__ == "__main__":
    main(sys.argv[1])
