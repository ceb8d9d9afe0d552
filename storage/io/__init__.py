"""Object stores, and the machine's services that a process uses: clocks, threads, memory.

object_store  the protocol of an object store
memory        an object store in memory
folder        an object store in a folder
s3            an object store in S3; the only module that imports the SDK
s3_options    the options of a connection to a bucket
s3_listing    byte order of keys, for servers that list by directory
open          opening of a store by its URL
probe         the check of a store at start
start_retry   retries of requests to the store while a broker starts
read_only     opening of a store to read; a folder store that writes nothing
blocking      a store for code without an event loop: its calls block
metered       a store that counts its requests
clock         wall time, boot time, ids
loop_thread   an event loop in a second thread: for large uploads, and for collection
malloc        settings of glibc's allocator; return of freed memory
tasks         errors of tasks, tasks that run together; the lowest priority of a thread
"""
