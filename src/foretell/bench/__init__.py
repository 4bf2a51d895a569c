"""Measuring: what a method gains on this machine, over plain decoding and over other runtimes, in one interleaved
run.
"""
