"""Whole models against transformers' on the CPU: tiny checkpoints, every module and the logits."""
