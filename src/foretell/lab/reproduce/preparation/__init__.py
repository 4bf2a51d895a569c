"""What claims need and nothing ships: small trainings and calibrations, kept in the folder of a report."""
