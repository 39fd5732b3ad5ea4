"""What each worker adds to vLLM's own calls, for `POST /collective_rpc`."""

import os

MODEL_KEYS = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers")


class WorkerExtension:
    """Mixed into vLLM's worker class (`--worker-extension-cls`)."""

    def slipstream_report(self):
        """What the last weight update came to: see `engines.Report`. None before the first one."""
        report = getattr(self.weight_transfer_engine, "report", None)
        return None if report is None else vars(report)

    def slipstream_newest_adapter(self):
        """How many layers the adapter that was loaded last is used in, and for which it would be and is not: vLLM says nothing of those."""
        manager = self.model_runner.lora_manager._adapter_manager
        layers = manager.get_adapter(max(manager.list_adapters())).loras
        unused = sorted(name for name in layers if name not in manager.modules)
        return {"used": len(layers) - len(unused), "unused": unused}

    def slipstream_about(self):
        """How the server was started, for who attaches to it."""
        config = self.vllm_config
        model = config.model_config.hf_text_config
        return {
            "backend": getattr(config.weight_transfer_config, "backend", None),
            "logprobs_mode": config.model_config.logprobs_mode,
            "device": config.device_config.device_type,
            "slots": config.scheduler_config.max_num_seqs,
            "adapters": self._adapter_room(),
            "model": {key: getattr(model, key, None) for key in MODEL_KEYS},
            "max_logprobs": config.model_config.max_logprobs,
            "sampling_mask": config.model_config.return_sampling_mask,
            "routing": self._slipstream_experts() if config.aux_output_config.enable_return_routed_experts else None,
        }

    def _slipstream_experts(self):
        """What `routed_experts` of an answer are to be read by: it has a row of experts for each layer, also for those that have none."""
        config = self.vllm_config.model_config
        layers = {m.layer_id for m in self.model_runner.get_model().modules() if type(m).__name__ == "MoERunner"}
        return {
            "layers": sorted(layers),
            "num_layers": config.get_total_num_hidden_layers(),
            "num_experts": config.get_num_experts(),
            "top_k": config.get_num_experts_per_tok(),
        }

    def _adapter_room(self):
        """None where the server takes no adapters."""
        lora = self.vllm_config.lora_config
        if lora is None:
            return None
        return {
            "places": lora.max_loras,
            "rank": lora.max_lora_rank,
            "targets": lora.target_modules,
            "while_running": os.environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "0").strip().lower() in ("1", "true"),
        }
