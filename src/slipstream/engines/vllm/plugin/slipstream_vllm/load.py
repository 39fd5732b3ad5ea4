"""New weights into vLLM's model, all or none.

vLLM's layerwise reload puts a layer's parameters on the meta device, lets the model's own loader run over them there, keeps the tensors
that it was given, and makes and copies a layer as soon as that is complete. So a wrong name in the last layer would be found after the
others had changed. Here the copying waits until the loader has seen everything:

    set aside (the old tensors) ──► the loader, on meta: names, shapes, fusing ──► every layer whole? ──► copy layer by layer
                                           └────────────── any error ──────────────────┴──► the old tensors are put back
"""

from contextlib import contextmanager

import torch
from vllm.model_executor.model_loader.reload import layerwise
from vllm.platforms import current_platform

from slipstream_vllm.experts import split_experts


class Broken(RuntimeError):
    """The copying itself failed: some layers are new, some old. Nothing may be sampled with them any more."""


def load_weights(model, model_config, tensors):
    """Load named tensors (a whole state dict, tied names included). ValueError: they do not fit, and the model is as it was."""
    layerwise.initialize_layerwise_reload(model)
    try:
        with _collected() as complete:
            model.load_weights(split_experts(tensors))
        _check_whole(model)
    except Exception as error:
        _put_back(model)
        raise ValueError(f"these weights do not fit the server's model: {error}") from error
    try:
        for layer, info in complete:
            layerwise._layerwise_process(layer, info)
        layerwise.finalize_layerwise_processing(model, model_config)
        _prepack_experts(model)
    except Exception as error:
        raise Broken(f"loading failed half way: {type(error).__name__}: {error}") from error


@contextmanager
def _collected():
    """Layers that became complete are collected here, not made and copied at once: a list of (layer, its reload state)."""
    complete, process = {}, layerwise._layerwise_process
    layerwise._layerwise_process = lambda layer, info: complete.setdefault(id(layer), (layer, info))
    found = []
    try:
        yield found
    finally:
        layerwise._layerwise_process = process
        found.extend(complete.values())


def _check_whole(model):
    """ValueError that names the first layer of which something is missing: a tensor, or a part of a fused group (q, k, v; gate, up)."""
    for name, layer in model.named_modules():
        info = layerwise.get_layerwise_info(layer)
        if not info.can_load() or layerwise.is_deferred_attention_layer(layer):
            continue
        needed = _num_needed(layer)
        if info.load_numel < needed:
            raise ValueError(
                f"{name} has {needed} numbers, and {info.load_numel} were sent; fused groups (q, k, v; gate, up) are sent whole"
            )


def _num_needed(layer):
    """Numbers that a checkpoint must hold for this layer's own parameters; rows that pad a vocabulary are not in it."""
    indices = getattr(layer, "shard_indices", None)
    if indices is not None and hasattr(indices, "num_org_elements"):
        return sum(p.numel() // p.shape[0] * indices.num_org_elements for p in layer.parameters(recurse=False))
    return sum(getattr(p, "weight_loader_numel", p.numel()) for p in layer.parameters(recurse=False))


def _put_back(model):
    """The old tensors are the model's again, untouched."""
    if hasattr(model, "_original_do_torchao_reload"):
        model._do_torchao_reload = model._original_do_torchao_reload
    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load() and info.kernel_tensors is not None:
            layerwise._place_kernel_tensors(layer, info)
        info.reset()
    layerwise.LOADING_LAYERS.clear()


@torch.no_grad()
def _prepack_experts(model):
    """On CPUs a layer of experts computes from a packed layout, which vLLM makes at the first load only."""
    if not current_platform.is_cpu():
        return
    for layer in model.modules():
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        if kernel is not None and hasattr(layer, "w13_weight"):
            kernel.fused_experts.process_weights_after_loading(layer)
