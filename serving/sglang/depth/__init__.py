"""How deep SGLang drafts in each step, measured and chosen."""
