"""Object stores, and the machine's services that a process uses: clocks, threads, memory.

object_store  the protocol of an object store
memory        an object store in memory
folder        an object store in a folder
s3            an object store in S3; the only module that imports the SDK
s3_options    how a bucket is reached
s3_listing    byte order of keys, for servers that list by directory
open          opening of a store by its URL
probe         the check of a store at start
start_retry   repetition of the requests of a start
read_only     a store that is opened to read; nothing is written
blocking      a store behind blocking calls
metered       a store that counts its requests
clock         wall time, boot time, ids
loop_thread   an event loop in a thread of its own, for large uploads
malloc        tuning of glibc's allocator
tasks         errors of tasks, tasks that run together; the lowest priority of a thread
"""
