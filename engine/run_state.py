"""The state of a run as a fold over its step records: what every view draws from.

``RunState.apply(record)`` advances by one step; ``RunState.restore(keyframe)`` begins anywhere. Folding all records from
the start gives the same state as the engine's own keyframe at every step: the tests hold that.
"""
