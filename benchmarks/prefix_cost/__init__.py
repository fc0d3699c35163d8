"""What a prefix cache brings where prompts share much, and what it costs where they share nothing."""
