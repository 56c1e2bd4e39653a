"""Plain simulations of the algorithms: what everything else must equal."""
