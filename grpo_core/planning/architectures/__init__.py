"""Models by the kinds of their layers, as far as a forecast needs them, read from config.json."""
