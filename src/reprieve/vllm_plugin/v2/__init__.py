"""vLLM's V2 model runner, the default where Triton is installed."""
