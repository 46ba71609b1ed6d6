"""The compiler interface that Triton requires; never called while TRITON_INTERPRET=1."""

from triton.backends.compiler import BaseBackend


class CpuBackend(BaseBackend):
    @staticmethod
    def supports_target(target):
        return target.backend == "cpu"

    def hash(self):
        return "interpreted"

    def parse_options(self, options):
        raise NotImplementedError("Triton's interpreter does the work")

    def add_stages(self, stages, options):
        raise NotImplementedError("Triton's interpreter does the work")

    def load_dialects(self, context):
        raise NotImplementedError("Triton's interpreter does the work")

    def get_module_map(self):
        return {}
