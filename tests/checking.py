"""How annotations are checked in the tests."""

from beartype import BeartypeConf, beartype

check_types = beartype(conf=BeartypeConf(is_pep484_tower=True))  # a whole number is a float, as to the type checker
