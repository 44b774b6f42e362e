"""What people run: the command line, benchmarks and studies."""
