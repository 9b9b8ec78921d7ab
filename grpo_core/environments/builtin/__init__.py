"""Tools that ship, one file each."""
