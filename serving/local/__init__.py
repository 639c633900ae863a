"""The embedded engine: any Llama-like Hugging Face model on CPU or one GPU.

The reference of how speculation, capture and swap work; small before fast. Read in this order: `target.py` and
`draft.py` (the two networks and their caches), `generation.py` (one request), `rounds.py` (draft → verify → commit),
`engine.py` (the loop around them).
"""
