"""Chat formats, one module per family of models. No HTTP here: plain conversations in, prompts and events out."""
