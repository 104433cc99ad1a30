"""How well confidences are calibrated on a real model, before and after: `python -m experiments.calibration`."""
