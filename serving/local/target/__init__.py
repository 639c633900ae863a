"""The target model: its layers, attention, ranking of tokens, and new weights."""
