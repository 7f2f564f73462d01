"""What is measured: ``python -m benchmarks [one_rank compile_time memory]``. Nothing here gates a test."""
