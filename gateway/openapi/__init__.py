"""The API's description: /openapi.json."""
