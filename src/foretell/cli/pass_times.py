"""Times of passes: those that the roofline model predicts for a calibrated machine, and those of earlier runs."""

import hashlib
from collections.abc import Mapping

import torch

from foretell.api import Model
from foretell.bench.machine import processor_name
from foretell.engine.pass_times import PassTimes
from foretell.model.load.packed_cache import cache_folder, cache_limit
from foretell.roofline.hardware import CALIBRATED, read_hardware_file, user_hardware_file

_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
_CONTEXT = 256
"""Cached tokens of the predicted passes."""


def kept_pass_times(model: Model, device: str) -> PassTimes:
    """Seconds of a model's passes: those of earlier runs on this machine, kept beside the packed weights; before there
    are any, those predicted, or usual for the kernels.
    """
    machine = processor_name() if device == "cpu" else torch.cuda.get_device_name()
    expected = (expected_pass(model) if device == "cpu" else None) or model.usual_passes
    # What is kept is relative to what was expected.
    identity = f"{model.config} {model.precision} {machine} {device} {torch.get_num_threads()} {expected}"
    if torch.distributed.is_initialized():
        identity += f" {torch.distributed.get_world_size()} processes"
    digest, folder = hashlib.sha256(identity.encode()).hexdigest()[:16], cache_folder()
    file = folder / f"{digest}.times.json" if cache_limit(folder) else None
    return PassTimes(None, expected, file, digest)


def expected_pass(model: Model) -> Mapping[int, float] | None:
    """Predicted seconds of a pass of a model by its number of tokens.

    None: the machine was not calibrated with so many threads and this precision, or the model does not run on its CPU.
    """
    file = user_hardware_file()
    if not file.is_file():
        return None
    from foretell.roofline.analysis import AnalyzedModel, predict_seconds
    from foretell.roofline.calibrate import pass_workload
    from foretell.roofline.formats import DTYPES, compute_class, number_format

    try:
        device = read_hardware_file(file).get(CALIBRATED)
    except ValueError:
        return None
    if device is None or device.title != processor_name() or model.precision not in DTYPES:
        return None
    form = number_format(model.precision)
    if compute_class(form, form) not in device.matmul_rates:
        return None
    analyzed = AnalyzedModel(model.name, model.config)
    return {n: predict_seconds(analyzed, device, pass_workload(form, n, _CONTEXT)) for n in _SIZES}
