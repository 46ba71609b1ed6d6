"""Small LTS calibrations with hand-picked constants."""

import torch

from reprieve.heads.lts import LtsCalibration
from tests.kit.tiny import IDENTITY

CPU = torch.device("cpu")


PROMPT = [3, 1, 4, 1, 5]


def calibration(**changes):
    values = dict(
        scale=torch.tensor([1.0, 0.5]),
        embedding_factors=torch.tensor([0.1]),
        logit_factors=torch.tensor([0.2]),
        tolerances=torch.tensor([0.5]),
        edges=torch.empty(0),
        pair=IDENTITY,
        task="arithmetic",
        delta=0.05,
    )
    return LtsCalibration(**{**values, **changes})
