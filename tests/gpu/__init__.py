"""The sections of ``python -m tests.gpu_check``: everything about a GPU that only a GPU can prove, in one command.

::

    tests.gpu_check  ── one line of JSON ──▶  tests.gpu.worker  ── a line of JSON for each figure ──▶  tests.gpu_check
    options, table,     sections, facts       one process that      figures, facts, the end of        prints at once,
    exit code                                 knows torch           each section                      ends what hangs

The parent knows neither torch nor CUDA: a section that hangs, or that leaves the card's context broken, costs that
section; the next ones go on in a new process.
"""
