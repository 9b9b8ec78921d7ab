"""The operating system and its processes: files that survive, processes that end, quiet libraries."""
