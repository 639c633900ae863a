"""A trace: its shape, its bytes, and files of recorded traces."""
