"""What the benchmarks run: cases, peers, timing."""
