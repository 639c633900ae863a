"""From new weights to a published version: candidate, gate, publication, review on live traffic, rollback."""
