"""llama.cpp's own HTTP server, in this process through ``xllamacpp``, asked over ``/completion`` as its clients do."""

import http.client
import importlib.metadata
import json
import time
from concurrent.futures import ThreadPoolExecutor


def start(job):
    import xllamacpp

    slots = job["max_concurrency"]
    params = xllamacpp.CommonParams()
    params.model.path = job["model"]
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    params.n_parallel = slots
    params.n_ctx = slots * job["max_model_len"]
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = job["threads"]
    # No prompt is to be found where an earlier one left it.
    params.cache_prompt = params.cache_idle_slots = False
    params.cache_ram_mib = 0
    params.verbosity = 1
    server = xllamacpp.Server(params)

    def answer(row):
        body = {
            "prompt": row["prompt_token_ids"],
            "n_predict": row["output_tokens"],
            "ignore_eos": True,
            "temperature": 0.0,
            "stream": True,
            "cache_prompt": False,
        }
        connection = http.client.HTTPConnection(server.listening_address.removeprefix("http://"))
        connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"the server answered {response.status}: {response.read().decode(errors='replace')}")
        times = []
        for line in response:
            if line.startswith(b"data: {"):
                now = time.perf_counter()
                # An event may tell of several tokens: those that end a character come with its beginning.
                times += [now] * (json.loads(line[6:])["tokens_predicted"] - len(times))
        connection.close()
        return times

    def run(rows, done):
        # The server queues those for which it has no slot.
        with ThreadPoolExecutor(len(rows)) as clients:
            waiting = [clients.submit(lambda i=i, row=row: done(i, answer(row))) for i, row in enumerate(rows)]
            for each in waiting:
                each.result()

    return importlib.metadata.version("xllamacpp"), run
