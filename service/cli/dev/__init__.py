"""`tidelog dev`.

command     the command: the broker as a child process, the banner, the end
departures  the live data: the producer, and the members of two groups
"""
