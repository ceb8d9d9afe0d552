"""Consumer groups on a broker. The group's state itself is in state/."""
