"""The only `@triton.jit` arithmetic shared by all paths: seqlens, mask, softmax, kv_load."""
