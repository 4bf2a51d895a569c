"""Fitting of exits: linear shortcuts by least squares, their refinement, and classifiers."""
