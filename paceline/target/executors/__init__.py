"""Forms of the target in torch operators, and the choice of one."""
