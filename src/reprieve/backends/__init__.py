"""Engines that answer a run: the local one, vLLM servers started here, running servers, Ray."""
