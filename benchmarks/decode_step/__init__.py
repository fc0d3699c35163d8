"""`python -m benchmarks.decode_step`: a decode step through the KV tiers beside one with all KV resident in HBM."""
