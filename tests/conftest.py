"""One thread: the models are tiny, and threads that wait for a busy core cost more than they bring."""

from importlib.util import find_spec

import torch

collect_ignore = [] if find_spec("vllm") else ["vllm"]  # `make test-vllm` runs these, in an environment of its own

torch.set_num_threads(1)
