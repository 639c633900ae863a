"""From a generation of the local engine to a trace."""
