"""Object stores, and the machine's services that a process uses: clocks, threads, memory.

object_store  the protocol of an object store
memory        an object store in memory
folder        an object store in a folder
s3            an object store in S3; the only module that imports the SDK
s3_options    the options of a connection to a bucket
s3_listing    byte order of keys, for servers that list by directory
open          opening of a store by its URL
probe         the check of a store at start
start_retry   repeats a step of a broker's start, for a limited time, until the store answers
read_only     opening of a store to read; a folder store that writes nothing
blocking      OpenedStore, opened to read, for code without an event loop: its calls block
metered       a store that counts its requests
clock         wall time, boot time, ids
loop_thread   a resource on the event loop of a second thread, for a caller with its own event loop
threads       threads that refuse work after their end, as an error of the log
malloc        settings of glibc's allocator; return of freed memory
tasks         exceptions in tasks; tasks that run together; steps; the lowest priority of a thread
"""
