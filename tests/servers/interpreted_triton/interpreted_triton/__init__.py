"""Triton's interpreter as a backend for CPUs, so that vLLM's model runner V2 runs where no compiler for its kernels is installed.

For tests: with TRITON_INTERPRET=1 each kernel runs in Python, line by line. vLLM only looks for a backend called "cpu"; nothing compiles.
"""
