"""DTensor's surface inside the compiled region: its views, methods, factories and contexts."""
