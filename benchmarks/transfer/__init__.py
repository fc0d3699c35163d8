"""How fast prompts travel from a prefill pool to a host pool, beside what carries them."""
