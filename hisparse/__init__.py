"""The KV tiers of a decode node: all tokens in host memory, a hot buffer per request on the device."""
