"""What happens between the first gradient of a step and ``step()``, alike for all optimizers.

``passes`` decides when a gradient is complete; ``hooks`` hands it over; ``watched`` notices who uses it while it is on
its way; ``late_averages`` warns of averages that a script has missed.
"""
