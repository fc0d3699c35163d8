"""The OpenAI-compatible front of the service: HTTP in, prefill and decode nodes paired, tokens streamed out."""
