"""How ranks find one another: the launch environment, process groups, and checks that ranks agree."""
