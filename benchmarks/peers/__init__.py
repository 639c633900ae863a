"""Trainers of other projects, in environments of their own."""
