"""vLLM's engine for CPUs, stepped in this process."""

import os
import time


def start(job):
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(job["kv_gb"])
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{job['threads'] - 1}"
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_NO_USAGE_STATS"] = os.environ["HF_HUB_OFFLINE"] = "1"
    import vllm
    from vllm import LLM, SamplingParams, TokensPrompt
    from vllm.sampling_params import RequestOutputKind

    engine = LLM(
        model=job["model"],
        dtype="bfloat16",
        max_num_seqs=job["max_concurrency"],
        max_model_len=job["max_model_len"],
        enable_prefix_caching=False,
        seed=0,
    ).llm_engine
    serial = 0

    def run(rows, done):
        nonlocal serial
        index, times = {}, [[] for _ in rows]
        for i, row in enumerate(rows):
            serial += 1
            index[str(serial)] = i
            params = SamplingParams(
                temperature=0.0,
                max_tokens=row["output_tokens"],
                ignore_eos=True,
                output_kind=RequestOutputKind.DELTA,
            )
            engine.add_request(str(serial), TokensPrompt(prompt_token_ids=row["prompt_token_ids"]), params)
        while engine.has_unfinished_requests():
            outputs = engine.step()
            now = time.perf_counter()
            for output in outputs:
                i = index[output.request_id.partition("-")[0]]  # it may add a suffix of its own
                times[i] += [now] * len(output.outputs[0].token_ids)
                if output.finished:
                    done(i, times[i])

    return vllm.__version__, run
