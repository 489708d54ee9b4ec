"""Benchmarks: two things compared in one run, by ratio; no part of the tests."""
