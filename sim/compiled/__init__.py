"""The compiled engine: the same integers as ``sim.run.simpy_engine``, hundreds of times as fast.

It executes the same workloads and plans and leaves the same log; a timeline, and a policy with an eviction rule that is
only Python, are the reference's alone. numba is imported when a run first asks for this engine (``engine.py``); whether
it can be is asked of ``availability.py``.
"""
