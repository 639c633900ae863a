"""SGLang servers on a CPU, and what is asked of them, for the scripts `sglang_*`."""
