"""One decode round: propose, verify, commit, report."""
