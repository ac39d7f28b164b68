"""Attention kernels for LLM serving on AMD Instinct, in Triton alone."""
