"""The label of the weights on every chunk of a stream.

vLLM tells which weights sampled which tokens in the last chunk alone. A token must be recorded with its version as it comes (a crash may
be next), so the spans so far are put on every chunk. They are vLLM's own: the engine attaches its label to each step's output.
"""

from functools import wraps


def label_every_chunk() -> None:
    """Have each output carry the spans up to its last token."""
    from vllm.v1.engine.output_processor import RequestState

    original = RequestState._new_completion_output
    if hasattr(original, "__wrapped__"):
        return

    @wraps(original)
    def labelled(self, *args, **kwargs):
        output = original(self, *args, **kwargs)
        if output.weight_versions is None:
            output.weight_versions = self._weight_version_spans()
        return output

    RequestState._new_completion_output = labelled
