"""The text that suffix drafts come from."""
