"""What travels between serving and training, and the draft model itself; imports neither service."""
