"""The prefix cache played on traces, without a model."""
