"""Times of passes that the roofline model predicts for a machine that was calibrated."""

from collections.abc import Mapping

from foretell.api import Model
from foretell.roofline.analysis import AnalyzedModel, predict_seconds
from foretell.roofline.calibrate import pass_workload
from foretell.roofline.formats import compute_class
from foretell.roofline.hardware import CALIBRATED, read_hardware_file, user_hardware_file

_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
_CONTEXT = 256
"""Cached tokens of the predicted passes."""


def expected_pass(model: Model) -> Mapping[int, float] | None:
    """Predicted seconds of a pass of a model by its number of tokens.

    None: the machine was not calibrated with so many threads and this precision, or the model does not run on its CPU.
    """
    file = user_hardware_file()
    if not file.is_file():
        return None
    from foretell.cli.roofline_machine import DTYPES, number_format, processor_name

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
