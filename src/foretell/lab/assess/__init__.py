"""Assesses a model, alone or beside another one: fidelity, calibration, knowledge, recall and robustness to noise.

The questions are those of a survey's section on compressed models; each is measured on texts and probes that come with
the package, or on the user's.
"""
