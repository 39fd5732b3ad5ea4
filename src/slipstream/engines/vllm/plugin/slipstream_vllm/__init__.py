"""slipstream's part inside a vLLM server. It runs in vLLM's environment, so it imports nothing of slipstream's.

vLLM calls `register` in each of its processes (entry point group `vllm.general_plugins`). The folder above this one on PYTHONPATH is the
whole installation: the package, and the metadata that names the entry point.

    weight engines      --weight-transfer-config '{"backend": "slipstream_shared_memory"}' (or slipstream_files)     engines.py, load.py
    report, about       --worker-extension-cls slipstream_vllm.worker.WorkerExtension                                worker.py
    version labels      on every chunk of a stream, not only on the last                                             labels.py
    a key everywhere    --middleware slipstream_vllm.middleware.RequireKey                                           middleware.py
    no orphans          SLIPSTREAM_VLLM_OWNED                                                                        parent.py
"""


def register() -> None:
    """Make the weight engines known and label every chunk. May be called more than once."""
    from slipstream_vllm.parent import end_with_parent

    end_with_parent()
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from slipstream_vllm.labels import label_every_chunk

    for name, engine in (("slipstream_shared_memory", "SharedMemoryEngine"), ("slipstream_files", "FilesEngine")):
        if name not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(name, "slipstream_vllm.engines", engine)
    label_every_chunk()
