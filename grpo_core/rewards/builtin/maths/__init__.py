"""The reward for mathematical answers, and the process in which it compares them."""
