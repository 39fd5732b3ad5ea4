from triton.backends.compiler import BaseBackend


class InterpretedBackend(BaseBackend):
    @staticmethod
    def supports_target(target):
        return target.backend == "cpu"

    def hash(self):
        return "interpreted"

    def parse_options(self, options):
        raise NotImplementedError

    def add_stages(self, stages, options, language):
        raise NotImplementedError

    def load_dialects(self, context): ...

    def get_module_map(self):
        return {}
