"""Experts by name. transformers 5 holds those of a layer as two tensors; checkpoints, which vLLM's loaders read, have three per expert."""


def split_experts(tensors):
    """(name, tensor) pairs as a checkpoint names them: `experts.gate_up_proj` [E, 2 I, H] and `experts.down_proj` [E, H, I] taken apart."""
    for name, tensor in tensors.items():
        if name.endswith(".experts.gate_up_proj") and tensor.ndim == 3:
            stem, half = name.removesuffix("gate_up_proj"), tensor.shape[1] // 2
            for index in range(tensor.shape[0]):
                yield f"{stem}{index}.gate_proj.weight", tensor[index, :half]
                yield f"{stem}{index}.up_proj.weight", tensor[index, half:]
        elif name.endswith(".experts.down_proj") and tensor.ndim == 3:
            for index in range(tensor.shape[0]):
                yield f"{name.removesuffix('down_proj')}{index}.down_proj.weight", tensor[index]
        else:
            yield name, tensor
