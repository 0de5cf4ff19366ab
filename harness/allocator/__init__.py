"""PyTorch's CUDA caching allocator as a pure simulation, and recordings of the real one.

In: allocations and frees in order, settings, a limit in bytes. Out: peaks, segments, the point where memory runs out.
It must not know whether the events come from a trace or a recording, and starts nothing.
"""
