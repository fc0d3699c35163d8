"""`hisparse-pd bench prefill`: a chunk of a prompt of a published shape, part by part, beside the hardware's limits."""
