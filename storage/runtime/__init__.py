"""The machine's services that a process uses: clocks, threads, tasks, memory; and the interface of
tracers."""
