"""What each worker adds to vLLM's own calls, for `POST /collective_rpc`."""

MODEL_KEYS = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers")


class WorkerExtension:
    """Mixed into vLLM's worker class (`--worker-extension-cls`)."""

    def slipstream_report(self):
        """What the last weight update came to: see `engines.Report`. None before the first one."""
        report = getattr(self.weight_transfer_engine, "report", None)
        return None if report is None else vars(report)

    def slipstream_about(self):
        """How the server was started, for who attaches to it."""
        config = self.vllm_config
        model = config.model_config.hf_text_config
        return {
            "backend": getattr(config.weight_transfer_config, "backend", None),
            "logprobs_mode": config.model_config.logprobs_mode,
            "device": config.device_config.device_type,
            "slots": config.scheduler_config.max_num_seqs,
            "model": {key: getattr(model, key, None) for key in MODEL_KEYS},
        }
