"""Capture inside SGLang: from the tensors of a step to finished traces."""
