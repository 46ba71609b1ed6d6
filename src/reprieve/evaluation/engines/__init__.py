"""What answers a run's problems: the engine on this machine, or servers."""
