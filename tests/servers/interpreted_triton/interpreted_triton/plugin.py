def register():
    """vLLM's kernel for top-k and top-p is more than the interpreter understands; vLLM has the same in PyTorch."""
    from vllm.v1.sample.ops import topk_topp_sampler

    topk_topp_sampler.HAS_TRITON = False
