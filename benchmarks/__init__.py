"""What is measured, as ratios of interleaved runs: ``python -m benchmarks [one_rank compile_time memory]``. Nothing here gates a test."""
