"""What is seen of a run: metrics.jsonl, samples.jsonl, the display, the sinks, the summary. Imports no torch."""
