"""A Triton backend that compiles nothing: vLLM finds Triton on a CPU, and Triton's interpreter does the work."""
