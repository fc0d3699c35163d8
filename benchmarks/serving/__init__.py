"""How an OpenAI-compatible service, this one or another, answers many clients at once."""
