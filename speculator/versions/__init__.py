"""Draft versions on disk: the store, each version's lifecycle, and the operator's commands."""
