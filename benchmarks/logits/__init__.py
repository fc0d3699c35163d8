"""`python -m benchmarks.logits`: how far logits are from float32, beside a plain computation in the same types."""
