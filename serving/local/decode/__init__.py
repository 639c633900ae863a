"""One decode round: propose, verify, commit, and tell those who watch."""
