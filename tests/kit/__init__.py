"""What tests share: tiny models, toy tasks, scripted miners, heads made in code."""
