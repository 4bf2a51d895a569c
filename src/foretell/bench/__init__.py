"""Measure methods against plain decoding and other runtimes on this machine, in one interleaved run."""
