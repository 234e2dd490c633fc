"""AOTAutograd: what it traces, cuts, wraps and gives back."""
