"""Inputs made to do harm, and who judges what became of them; tests take few, benchmarks/bad_inputs.py takes many."""
