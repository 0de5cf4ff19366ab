"""What a preset was run for: one table each."""
