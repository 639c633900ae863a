"""Groups of samples of one prompt: what runs next, where, for how long, and how deep it drafts. No I/O in here."""
