"""What computes for both roles: batches, the model runner and its sampling, chunked prefill and its pages."""
