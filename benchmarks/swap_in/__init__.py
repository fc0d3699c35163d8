"""How fast the CUDA swap-in is, against misses and batch, and how good its replacement policy is."""
