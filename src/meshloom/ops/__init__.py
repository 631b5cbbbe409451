"""Array functions without parameters of their own: attention, norms, rotary positions, losses. A plain reference each, plus faster rows."""
