"""Request bodies, validated: one module per endpoint."""
