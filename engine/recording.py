"""A run in one file: written while it goes on, read meanwhile, bounded, and whole up to wherever it breaks off.

::

    | header | segment | segment | segment | end |
               └─ keyframe │ step │ step │ text │ step …        a fold may begin at any keyframe

A segment ends after a number of changes (events and rows) or of steps, so that any jump folds little. Where the file
would grow beyond its limit its oldest segments go. Damaged bytes cost the steps from there to the next keyframe, not
the file; a file that breaks off is read up to its last whole step. Light: numpy and msgspec only.
"""

from engine.run_file import RecordingError, RunHeader, Text
from engine.run_reader import RunReader
from engine.run_writer import DEFAULT_LIMIT_BYTES, MIN_LIMIT_BYTES, RunWriter

__all__ = [
    "DEFAULT_LIMIT_BYTES",
    "MIN_LIMIT_BYTES",
    "RecordingError",
    "RunHeader",
    "RunReader",
    "RunWriter",
    "Text",
]
