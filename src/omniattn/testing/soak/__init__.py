"""``omniattn verify --soak``."""
