"""Runs one job through one peer engine: ``PYTHON drive.py MODULE JOB.json``, with an interpreter that has the engine.

It runs where nothing of Batchscope is installed, so it imports the standard library and, by name, the module beside it
that knows the engine. Such a module has one function::

    start(job) -> (version, run)    loads the model; run(rows, done) answers all rows, at most job["max_concurrency"]
                                    at once

``done(i, times)`` is called when row ``i`` has ended, with ``time.perf_counter()`` of each of its output tokens. What
was measured goes, a JSON object a line, to the file ``job["out"]`` as soon as it is known, so that a run that is
stopped has told what it completed::

    {"version": …}                     of the engine
    {"first_token_at": …}              seconds since the epoch, of the warm-up request: the start is over
    {"request": i, "times": [...]}     seconds after all rows were there
    {"peak_memory_mb": …}              the last line of a run that came to its end
"""

import importlib
import json
import os
import resource
import sys
import time
from pathlib import Path


def main():
    module, job_file = sys.argv[1:]
    job = json.loads(Path(job_file).read_text())
    with Path(job["out"]).open("w", buffering=1) as out:

        def tell(**what):
            out.write(json.dumps(what) + "\n")

        version, run = importlib.import_module(module).start(job)
        tell(version=version)
        run([job["warm_up"]], lambda i, times: tell(first_token_at=time.time() - time.perf_counter() + times[0]))
        begin = time.perf_counter()
        run(job["rows"], lambda i, times: tell(request=i, times=[round(t - begin, 6) for t in times]))
        tell(peak_memory_mb=peak_memory_mb())
    sys.stdout.flush()
    os._exit(0)  # native threads of an engine may outlive the interpreter, and then crash


def peak_memory_mb():
    """Most that this process had resident, plus the same of its living descendants, in MB of 2^20 bytes."""
    if not sys.platform.startswith("linux"):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / (2**20 if sys.platform == "darwin" else 2**10)
    return sum(map(_high_water_kb, _family(os.getpid()))) / 2**10


def _family(pid):
    found = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = task.read_text().split()
        except OSError:  # ended meanwhile
            continue
        for child in children:
            found += _family(int(child))
    return found


def _high_water_kb(pid):
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)


if __name__ == "__main__":
    main()
