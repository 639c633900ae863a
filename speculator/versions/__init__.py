"""Draft versions on disk: the store, the life of each version, and what an operator may do with them."""
