"""Facts only (catalogue, GPU table, measurements, calibration); read as package resources, never imported as `data`."""
