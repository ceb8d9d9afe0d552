"""The machine's services for a process: clocks, threads, tasks, memory, tracers' interface."""
