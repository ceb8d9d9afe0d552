"""tidelog.client on an application in this process, with faults between them."""
