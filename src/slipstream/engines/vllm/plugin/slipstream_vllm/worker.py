"""What each worker adds to vLLM's own calls: the report of its last weight update, for `POST /collective_rpc`."""


class WorkerExtension:
    """Mixed into vLLM's worker class (`--worker-extension-cls`)."""

    def slipstream_report(self):
        """What the last update came to: see `engines.Report`. None before the first one."""
        report = getattr(self.weight_transfer_engine, "report", None)
        return None if report is None else vars(report)
