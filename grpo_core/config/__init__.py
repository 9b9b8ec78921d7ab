"""The configuration: sections and keys, the rules across them, TOML in and out, the table of metrics."""
