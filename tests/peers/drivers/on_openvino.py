"""OpenVINO GenAI's ``ContinuousBatchingPipeline``, stepped in this process."""

import time


def start(job):
    import numpy
    import openvino
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.max_num_batched_tokens = 512
    scheduler.max_num_seqs = job["max_concurrency"]
    scheduler.dynamic_split_fuse = True
    scheduler.enable_prefix_caching = False
    scheduler.cache_size = 2  # GB, taken as needed
    pipeline = openvino_genai.ContinuousBatchingPipeline(
        job["model"], scheduler, "CPU", {"INFERENCE_NUM_THREADS": str(job["threads"])}
    )
    serial = 0

    def add(row):
        nonlocal serial
        serial += 1
        generation = openvino_genai.GenerationConfig()
        generation.max_new_tokens = generation.min_new_tokens = row["output_tokens"]
        generation.ignore_eos = True
        generation.do_sample = False
        prompt = openvino.Tensor(numpy.array([row["prompt_token_ids"]], dtype=numpy.int64))
        return pipeline.add_request(serial, prompt, generation)

    def run(rows, done):
        waiting = list(enumerate(rows))
        running = {}
        while waiting or running:
            # With split and fuse the pipeline does not hold max_num_seqs itself.
            while waiting and len(running) < job["max_concurrency"]:
                i, row = waiting.pop(0)
                running[i] = (add(row), [])
            pipeline.step()
            now = time.perf_counter()
            for i, (handle, times) in list(running.items()):
                while handle.can_read():
                    times += [now] * sum(len(output.generated_ids) for output in handle.read().values())
                if len(times) >= rows[i]["output_tokens"]:
                    del running[i]
                    done(i, times)
            if running and not pipeline.has_non_finished_requests():
                raise RuntimeError(f"the pipeline has no work left, but {len(running)} requests are unanswered")

    return openvino_genai.__version__, run
