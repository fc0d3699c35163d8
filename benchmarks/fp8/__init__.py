"""Products of block-fp8 weights on a GPU, in the shapes of DeepSeek-V3.2 and GLM-5."""
