"""Rollouts: prompts in, sampled and verified responses out."""
