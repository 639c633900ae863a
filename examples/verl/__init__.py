"""verl trains; a Slipstream server generates its rollouts (docs/how-to/verl.md)."""
