"""One thread: the models are tiny, and threads that wait for a busy core cost more than they bring."""

import torch

torch.set_num_threads(1)
