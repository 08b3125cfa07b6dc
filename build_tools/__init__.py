"""Registry rows to cubins and manifest, their way into the wheel, and the guard of the recorded GPU results."""
