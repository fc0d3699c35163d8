"""How many pieces a prompt's host slots are in after hours of requests that come, grow and go."""
