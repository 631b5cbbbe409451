"""What a run will cost, and proof that it does: costs, collectives counted in compiled programs, verification."""
