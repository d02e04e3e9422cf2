"""Operator commands, the demo, the replay of transcripts and the benchmarks."""
