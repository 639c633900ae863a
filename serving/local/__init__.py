"""The embedded engine: any Llama-like Hugging Face model on a CPU or one GPU; small before fast.

Read in this order: `target/model.py` and `draft.py` (the two networks and their caches), `request.py` (one request),
`decode/rounds.py` (draft, verify, commit), `scheduler/step_loop.py` (the loop around them), `engine.py` (the whole).
"""
