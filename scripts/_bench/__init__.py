"""Benchmarks: the correctness gate, interleaved timing on rotated inputs, ceilings, peers and result lines."""
